"""`agentrl train`: runs all processes of a run, on this machine or on the hosts of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.configs.run_config import RunConfig

INTERRUPTED_STATUS = 130


def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, e.g. trainer.lr=1e-4 steps=20.")
    ] = None,
    from_base: Annotated[
        bool,
        typer.Option("--from-base", help="Without a usable checkpoint, train all steps again from the base model."),
    ] = False,
) -> None:
    """Start the engine, proxy, rollouts and trainer, and supervise them until the run is finished. Resumes a stopped
    run.
    """
    from agentrl.configs.config_files import load_config

    run = load_config(config, overrides)
    with exit_when_stopped():
        supervise(run, from_base=from_base)


def supervise(run: RunConfig, *, from_base: bool = False) -> None:
    """Run all processes of a run where it is placed, and show its results. Raises UserError and Stopped."""
    from agentrl.console import Console
    from agentrl.launch import local_run, packaged_runs, placed_run, slurm_run
    from agentrl.placement.schedulers import is_placed_elsewhere, scheduler_of

    console = Console()
    if run.placement == "local":
        results = local_run.train(run, console, from_base=from_base)
    elif run.placement == "slurm" and not is_placed_elsewhere():
        results = slurm_run.train(run, console, from_base=from_base)
    else:
        results = placed_run.train(run, console, scheduler_of(run), from_base=from_base)
    packaged_runs.show_results(run, results, console)


@contextmanager
def exit_when_stopped() -> Iterator[None]:
    """Exit with status 130 on Stopped, after printing how to resume."""
    from agentrl.launch.run_lifecycle import Stopped

    try:
        yield
    except Stopped as stopped:
        say(str(stopped))
        raise typer.Exit(INTERRUPTED_STATUS) from None
