"""`stats_tracker.get(scope).scalar(reward=…)`, as AReaL has it.

scalar ──► the running episode ──► its session ──► the means `rollout/NAME` of a step (agentrl/rollout/episode_stats.py)
      └──► sums and counts of this process, by scope, for `export_all`
"""

from __future__ import annotations

import math
from collections import defaultdict

from agentrl.rollout.episode_stats import measure


class StatsTracker:
    """The scalars of one scope."""

    def __init__(self, scope: str = "") -> None:
        self._scope = scope
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def scalar(self, **values: float) -> None:
        """Add one value to each name. Values that are not finite are left out.

        Raises UserError for a name that is too long, and for more names than an episode may have.
        """
        for name, value in values.items():
            if math.isfinite(number := float(value)):
                self._sums[name] += number
                self._counts[name] += 1
                measure(name, number, self._scope)

    def export(self) -> dict[str, float]:
        """The mean of each name since the last export."""
        means = {name: self._sums[name] / count for name, count in self._counts.items()}
        self._sums.clear()
        self._counts.clear()
        return means


_trackers: dict[str, StatsTracker] = {}


def get(scope: str = "") -> StatsTracker:
    """The tracker of a scope; one is made at its first use."""
    return _trackers.setdefault(scope, StatsTracker(scope))


def export_all() -> dict[str, float]:
    """The means of all scopes as `scope/name`, of the scope without a name as `name`, since the last export."""
    return {
        f"{scope}/{name}" if scope else name: mean
        for scope, tracker in _trackers.items()
        for name, mean in tracker.export().items()
    }
