"""The placement of a supervisor that is placed itself: a step of a Slurm job, or a Job of Kubernetes.

The script or the manifests that started it start the task runners too, but not before the supervisor has written which
parts the run wants: a runner that finds the parts that an earlier supervisor stopped ends at once. So the supervisor
writes a file when runners may start, and takes it away when the parts have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.placement.part_spec import PartSpec
from agentrl.placement.scheduler import RunnerState

PLACED_FILE = "AGENTRL_PLACED_FILE"
"""Variable with the path of the file."""


class PlacedElsewhere:
    """Leaves placing to those who started this process."""

    def __init__(self, file: Path, *, moves_supervisor: bool = False) -> None:
        self.moves_supervisor = moves_supervisor
        self._file = file

    def check(self, parts: Sequence[PartSpec]) -> None:
        """Nothing: the hosts are there already, or come when the scheduler has them."""

    def apply(self, parts: Sequence[PartSpec]) -> None:
        """Let the task runners start."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()

    def states(self) -> list[RunnerState]:
        """Nothing is known: the scheduler is not asked."""
        return []

    def remove(self, *, kill: bool = False) -> None:
        """Let no task runner start that has not yet."""
        self._file.unlink(missing_ok=True)
