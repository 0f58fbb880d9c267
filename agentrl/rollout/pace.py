"""Slows down a worker while all of its sessions fail.

    a session succeeds ──► no pause        a whole group fails ──► pause 0.5 s, 1 s, 2 s, … at most 1 s per session

The proxy counts the failures of all workers and fails the run at `rollout.max_failures_in_a_row`: then `RunFailed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from agentrl.errors import AgentRLError, RequestError
from agentrl.rollout.episode import Outcome
from agentrl.rollout.worker_display import Progress

FIRST_S = 0.5
PER_SESSION_S = 1.0


class RunFailed(AgentRLError):
    """The run has failed; the message is the run's error."""


def check(refused: RequestError) -> None:
    """Raise RunFailed for a start that was rejected because the run has failed."""
    if refused.code == "run_failed":
        raise RunFailed(str(refused))


class Pace:
    """Delays the groups of a worker while they fail."""

    def __init__(self, progress: Progress, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.failed_groups = 0  # in a row
        self._size = 1  # sessions of the last group
        self._progress, self._sleep = progress, sleep
        self._turn = asyncio.Lock()

    @property
    def pause_s(self) -> float:
        """Seconds before the next group: 0, or 0.5, 1, 2, … up to PER_SESSION_S for each session of the last group."""
        if not self.failed_groups:
            return 0.0
        return min(FIRST_S * 2.0 ** min(self.failed_groups - 1, 30), PER_SESSION_S * self._size)

    def saw(self, outcomes: Collection[Outcome]) -> None:
        """Record the outcomes of a group."""
        failed = all(outcome.error is not None for outcome in outcomes)
        self.failed_groups, self._size = self.failed_groups + 1 if failed else 0, len(outcomes)

    async def wait(self) -> None:
        """Wait before starting a group; waiting groups start one after another."""
        async with self._turn:
            if self.failed_groups:
                self._progress.waiting_for = f"{self.pause_s:g} s: the last sessions all failed"
                await self._sleep(self.pause_s)
                self._progress.waiting_for = None
