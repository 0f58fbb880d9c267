"""The pause before a restart grows with quick deaths in a row, up to a bound."""

from __future__ import annotations

import pytest

from agentrl.processes.restarts import LIVED_S, Backoff, pause_s


@pytest.mark.parametrize(
    ("quick_deaths", "seconds"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (10_000, 10.0)]
)
def test_the_pause_grows_to_a_bound(quick_deaths: int, seconds: float) -> None:
    assert pause_s(quick_deaths) == seconds


def test_only_quick_deaths_in_a_row_are_spaced_out() -> None:
    backoff = Backoff()
    assert [backoff.after(lived_s) for lived_s in (1.0, 1.0, LIVED_S, 1.0, 1.0)] == [0.5, 1.0, 0.0, 0.5, 1.0]
