"""Numbers that an agent measures in its episode, by name: they are stored with the session and averaged in the metrics.

episode ── {"tool_calls": 3, "time/reward": 0.2} ──► its session ──► rollout/tool_calls       of the step that trains it
                                                               └──► eval-rollout/SETTING/…    of its evaluation
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from agentrl.errors import UserError

MOST_STATS = 32
"""Maximum names of a session, and of a batch: of more names in a batch the most frequent are kept."""
LONGEST_STAT = 100
"""Characters of a name."""
LARGEST_VALUE = 1e100
"""Largest absolute value."""
OF_REWARDS = "reward"
"""The first part of the names of numbers that reward components measure."""
ROLLOUT, EVALUATION = "rollout", "eval-rollout"
"""The first part of a metric's name."""


def check_name(name: object) -> str:
    """A name that can be stored. Raises UserError."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_STAT or not name.isprintable():
        raise UserError(f"stats: {str(name)[:LONGEST_STAT]!r} is no name of 1 to {LONGEST_STAT} printable characters")
    return name


def checked(stats: Mapping[str, float]) -> dict[str, float]:
    """The values of a session. Raises UserError for too many names, and for a name or a value that is not valid."""
    if len(stats) > MOST_STATS:
        raise UserError(f"stats: {len(stats)} names, at most {MOST_STATS} are stored")
    found: dict[str, float] = {}
    for name, value in stats.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_VALUE:
            raise UserError(f"stats: {check_name(name)} is {value!r}, not a finite number of at most {LARGEST_VALUE:g}")
        found[check_name(name)] = number
    return found


def frequent_means(values: Mapping[str, Sequence[float]], most: int = MOST_STATS) -> dict[str, float]:
    """The means of the names that have the most values."""
    frequent = sorted(values, key=lambda name: (-len(values[name]), name))[:most]
    return {name: fmean(values[name]) for name in frequent}
