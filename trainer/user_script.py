"""Runs `trainer.script`, a training script of the user, in place of the built-in loop."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UserError
from agentrl.trainer.training_run import TrainingRun

Opens = Callable[[], AbstractContextManager[TrainingRun]]


@dataclass(slots=True)
class Place:
    """The trainer's process, in which the script runs."""

    opens: Opens
    run: TrainingRun | None = None  # the run that the script has opened

    @contextmanager
    def open(self) -> Iterator[TrainingRun]:
        """The run, once. Raises UserError when the script opens it again."""
        if self.run is not None:
            raise UserError("agentrl.training: the script has opened its run already")
        with self.opens() as run:
            self.run = run
            yield run


PLACE: ContextVar[Place | None] = ContextVar("place", default=None)
"""Set while a script runs as a run's trainer."""


def run_script(script: list[str], opens: Opens) -> bool:
    """Run a file with its arguments as `__main__`; it opens the run by `agentrl.training`. Returns whether the run has
    all of its steps; false when it was told to stop.

    Raises UserError when the file does not exist, opens no run, or leaves it before its last step.
    """
    file, place = Path(script[0]), Place(opens)
    if not file.is_file():
        raise UserError(f"trainer.script: {file} does not exist")
    token, argv = PLACE.set(place), sys.argv
    sys.argv = list(script)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE` does
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        PLACE.reset(token)
        sys.argv = argv
    if place.run is None:
        raise UserError(f"trainer.script: {file} ended without a call of agentrl.training")
    if not place.run.finished and not place.run.stopped:
        steps = place.run.config.steps
        raise UserError(f"trainer.script: {file} ended after step {place.run.step} of {steps}: train until None")
    return place.run.finished
