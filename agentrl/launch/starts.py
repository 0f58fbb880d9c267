"""Engines that were started and do not serve yet: each has `engine.start_timeout_s`, at every start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from agentrl.errors import EngineUnavailable

STALE_S = 5.0
"""How long after a restart the store may still have the engine's earlier state."""


class Starts:
    """When engines were started, by URL; one that has answered the proxy is forgotten."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._started_at: dict[str, float] = {}

    def started(self, url: str) -> None:
        """Its process has begun."""
        self._started_at[url] = self._clock()

    def check(self, states: Mapping[str, str]) -> None:
        """Look at the engines' states. Raises EngineUnavailable for one that has not come in time."""
        now = self._clock()
        for url, at in list(self._started_at.items()):
            if states.get(url, "dead") != "dead":
                if now - at > STALE_S:
                    del self._started_at[url]
            elif now - at > self._limit_s:
                raise EngineUnavailable(f"the engine {url} does not serve {self._limit_s:g} s after its start")
