"""Stats of sessions: what is refused, and the means of the most frequent names."""

from __future__ import annotations

import math

import pytest

from agentrl.domain.session_stats import LONGEST_STAT, MOST_STATS, checked, frequent_means
from agentrl.errors import UserError


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"": 1.0}, "'' is no name of 1 to 100 printable characters"),
        ({"x" * (LONGEST_STAT + 1): 1.0}, "is no name"),
        ({"a\nb": 1.0}, "is no name"),
        ({"a": math.nan}, "a is nan, not a finite number"),
        ({"a": math.inf}, "a is inf, not a finite number"),
        ({"a": 1e101}, "a is 1e.101, not a finite number of at most 1e.100"),
        ({"a": "many"}, "a is 'many', not a finite number"),
        ({str(i): 0.0 for i in range(MOST_STATS + 1)}, "33 names, at most 32 are stored"),
    ],
)
def test_stats_out_of_bounds_are_refused_by_name(stats: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked(stats)


def test_valid_stats_are_kept() -> None:
    stats = {f"time/phase {i}": -float(i) for i in range(MOST_STATS)}
    assert checked(stats) == stats
    assert checked({"turns": 3}) == {"turns": 3.0}


def test_the_most_frequent_names_have_means() -> None:
    assert frequent_means({"a": [1.0], "b": [1.0, 3.0], "c": [5.0]}, 2) == {"b": 2.0, "a": 1.0}
