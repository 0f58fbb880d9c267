"""`stats_tracker.get(scope).scalar(reward=…)`, as AReaL has it: sums and counts of this process, by scope."""

from __future__ import annotations

import math
from collections import defaultdict


class StatsTracker:
    """The scalars of one scope."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def scalar(self, **values: float) -> None:
        """Add one value to each name. Values that are not finite are left out."""
        for name, value in values.items():
            if math.isfinite(number := float(value)):
                self._sums[name] += number
                self._counts[name] += 1

    def export(self) -> dict[str, float]:
        """The mean of each name since the last export."""
        means = {name: self._sums[name] / count for name, count in self._counts.items()}
        self._sums.clear()
        self._counts.clear()
        return means


_trackers: dict[str, StatsTracker] = defaultdict(StatsTracker)


def get(scope: str = "") -> StatsTracker:
    """The tracker of a scope; one is made at its first use."""
    return _trackers[scope]


def export_all() -> dict[str, float]:
    """The means of all scopes as `scope/name`, since the last export."""
    return {f"{scope}/{name}": mean for scope, tracker in _trackers.items() for name, mean in tracker.export().items()}
