"""Enforces `engine.start_timeout_s` after each start of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from agentrl.errors import EngineUnavailable

STALE_S = 5.0
"""How long after a restart the store may still report the engine's earlier state."""


class Starts:
    """Start times of engines by URL. An engine is removed once the proxy has reached it."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._started_at: dict[str, float] = {}

    def started(self, url: str) -> None:
        """Record the start of an engine's process."""
        self._started_at[url] = self._clock()

    def check(self, states: Mapping[str, str]) -> None:
        """Check the engines' states. Raises EngineUnavailable for an engine that exceeds its start timeout."""
        now = self._clock()
        for url, at in list(self._started_at.items()):
            if states.get(url, "dead") != "dead":
                if now - at > STALE_S:
                    del self._started_at[url]
            elif now - at > self._limit_s:
                raise EngineUnavailable(f"engine {url} is not serving {self._limit_s:g} s after its start")
