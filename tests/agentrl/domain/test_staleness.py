"""Ages and admission: tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.staleness import NO_BOUND, ages, ancestors, capacity


@pytest.mark.parametrize(
    ("version", "parents", "expected"),
    [
        (0, {0: None}, {0: 0}),
        (2, {0: None, 1: 0, 2: 1}, {0: 2, 1: 1, 2: 0}),
        # 2 and 3 were rolled back; the run went on from 1 with 4. Their tokens are as old as version 1.
        (4, {0: None, 1: 0, 2: 1, 3: 2, 4: 1}, {0: 2, 1: 1, 2: 1, 3: 1, 4: 0}),
        # A version that is newer than the step's own is not older than it.
        (1, {0: None, 1: 0, 2: 1}, {0: 1, 1: 0, 2: 0}),
        # Only the newest rows were read (`runs.young_ages`): 3 left the lineage at 0, which is not among them.
        (2, {1: 0, 2: 1, 3: 0}, {1: 1, 2: 0, 3: 2}),
    ],
)
def test_an_age_counts_versions_of_the_lineage(version, parents, expected):
    assert ages(version, parents) == expected


@given(st.lists(st.integers(0, 3), max_size=12))
def test_a_later_version_is_never_older_whatever_was_rolled_back(rolled_back_steps):
    """Before each new version some of the newest steps are rolled back. Leases rely on it (`leases.is_young`)."""
    parents: dict[int, int | None] = {0: None}
    newest = 0
    for back in rolled_back_steps:
        lineage = ancestors(newest, parents)
        parents[len(parents)] = lineage[min(back, len(lineage) - 1)]
        newest = len(parents) - 1
    by_version = [age for _, age in sorted(ages(newest, parents).items())]
    assert by_version == sorted(by_version, reverse=True)


@pytest.mark.parametrize(
    ("staleness", "published", "expected"), [(0, 0, 4), (1, 0, 8), (1, 3, 20), (4, 0, 20), (4, 9, 40)]
)
def test_the_capacity_follows_from_staleness_and_steps(staleness, published, expected):
    assert capacity(max_staleness=staleness, published_step=published, groups_per_step=4, target_steps=10) == expected


@pytest.mark.parametrize(("target", "expected"), [(0, NO_BOUND), (1, 4), (2, 8), (3, 12), (10, 12)])
def test_no_more_groups_start_than_the_run_trains(target, expected):
    """A run without steps trains nothing and has no bound."""
    assert capacity(max_staleness=2, published_step=0, groups_per_step=4, target_steps=target) == expected
