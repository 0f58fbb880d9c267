"""How many calls may be sent to an engine again because another one failed them.

Retry libraries bound the attempts of one call; this module bounds the attempts of the whole process.
"""

from __future__ import annotations

WINDOW_S = 30.0
SHARE = 0.2
FLOOR = 128


class RetryBudget:
    """Bounds resubmissions by the number of calls, so that retries do not keep an overloaded fleet down.

    In the last WINDOW_S to 2 · WINDOW_S seconds there may be FLOOR + SHARE · calls + running calls. The death of one
    engine is always within the budget; calls that kill one engine after another are not. Times are of one clock, in
    seconds.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._calls = self._retries = 0
        self._calls_before = self._retries_before = 0

    def call(self, now: float) -> None:
        """A call begins."""
        self._turn(now)
        self._calls += 1

    def take(self, now: float, under_way: int) -> bool:
        """Whether a call may be sent again; counts it if so."""
        self._turn(now)
        allowed = FLOOR + SHARE * (self._calls + self._calls_before) + under_way
        if self._retries + self._retries_before >= allowed:
            return False
        self._retries += 1
        return True

    def _turn(self, now: float) -> None:
        passed = now - self._began
        if passed < WINDOW_S:
            return
        recent = passed < 2 * WINDOW_S
        self._calls_before, self._retries_before = (self._calls, self._retries) if recent else (0, 0)
        self._calls = self._retries = 0
        self._began = now
