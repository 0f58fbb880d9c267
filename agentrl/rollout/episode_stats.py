"""The numbers that an episode measures while it runs, wherever in its code: `measure("tool_calls", 3)`.

Each episode has its own numbers, which the tasks and threads that it starts share.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.domain.session_stats import EVALUATION, MOST_STATS, ROLLOUT, checked
from agentrl.errors import UserError
from agentrl.rollout.agent import Agent
from agentrl.rollout.score import Result, result_of


class EpisodeStats:
    """The values of one episode, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Add a value. Raises UserError for a name or a value that is not valid, and for too many names."""
        checked({name: value})
        with self._lock:
            if name not in self._sums and len(self._sums) >= MOST_STATS:
                raise UserError(f"stats: {name!r} would be name {MOST_STATS + 1} of this episode; at most {MOST_STATS}")
            self._sums[name] += value
            self._counts[name] += 1

    def means(self) -> dict[str, float]:
        """The mean of each name."""
        with self._lock:
            return {name: total / self._counts[name] for name, total in self._sums.items()}


_current: ContextVar[EpisodeStats | None] = ContextVar("episode_stats", default=None)


def measure(name: str, value: float, scope: str = "") -> None:
    """Add a value to the running episode; outside of an episode this does nothing.

    The name of another scope than `rollout` and `eval-rollout` begins with it. Raises UserError as `EpisodeStats.add`.
    """
    stats = _current.get()
    if stats is not None:
        stats.add(name if scope in ("", ROLLOUT, EVALUATION) else f"{scope}/{name}", value)


@contextmanager
def measured() -> Iterator[EpisodeStats]:
    """The stats of the episode that runs in the block."""
    stats = EpisodeStats()
    token = _current.set(stats)
    try:
        yield stats
    finally:
        _current.reset(token)


async def run_measured(agent: Agent, data: Json, **extra: Any) -> Result:
    """Run an episode; its result has what it measured, and what it returned as `stats`. Raises what the agent raises,
    and UserError.
    """
    with measured() as stats:
        result = result_of(await agent.run(data, **extra))
    return replace(result, stats=checked({**stats.means(), **result.stats}))
