"""The interface of all schedulers: they place task runners, and refuse what they cannot place.

A placement starts `agentrl task --folder RUN_DIR --part PART --rank RANK` on a host with the part's resources, once for
each rank of each part, and again whenever it ends with a status other than 0 (also because its host was lost). It sets
`CUDA_VISIBLE_DEVICES`. Ports, secrets, leases, gangs and logs are the task runners' work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.errors import AgentRLError
from agentrl.placement.part_spec import PartSpec


class SchedulerUnavailable(AgentRLError):
    """The scheduler does not answer. What it has started may go on."""


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A task runner's state. `reason`: why it waits, in the scheduler's words, or how it ended last."""

    part: str
    rank: int
    state: str  # waiting, placed, ended
    host: str = ""
    reason: str = ""
    refusals: int = 0  # how often in a row it ended because its input was wrong: USER_ERROR_STATUS


class Placement(Protocol):
    """A scheduler. Every method may be repeated, also by another process on another host after a crash."""

    moves_supervisor: bool
    """Whether SIGTERM means that the supervisor's host is taken away: the parts go on, another supervisor follows."""

    def check(self, parts: Sequence[PartSpec]) -> None:
        """Raise ConfigError, in one line, when the scheduler's hosts can never hold all parts at once."""

    def apply(self, parts: Sequence[PartSpec]) -> None:
        """Start the task runners that are missing. Those that run, from any supervisor, go on."""

    def states(self) -> list[RunnerState]:
        """The states of the run's task runners. Raises SchedulerUnavailable."""

    def remove(self, *, kill: bool = False) -> None:
        """Take all task runners away once they have ended by themselves; with `kill`, at once."""


def runner_command(folder: Path, part: str, rank: int | str) -> list[str]:
    """The command of a task runner."""
    ours = ["task", "--folder", str(folder), "--part", part, "--rank", str(rank)]
    return [sys.executable, "-m", "agentrl", *ours]
