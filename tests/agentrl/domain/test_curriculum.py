"""Which tasks a pass skips, and how many sessions a group has."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.curriculum import AdaptiveGroup, Curriculum, coin, mixed_chance

CURRICULUM = Curriculum(low=0.25, high=0.75, skip=0.4, success=1.0, groups=2)


@pytest.mark.parametrize(
    ("rewards", "rate", "outside"),
    [
        ([], None, False),  # nothing is known
        ([1.0, 1.0], 1.0, True),
        ([0.0, 0.5, 0.99], 0.0, True),
        ([1.0, 1.0, 1.0, 0.0], 0.75, False),  # the ends of the target are in it
        ([1.0, 0.0, 0.0, 0.0], 0.25, False),
        ([2.0, 0.1 + 0.2 + 0.7], 1.0, True),  # rounding fails no episode
    ],
)
def test_a_task_outside_the_target_always_or_never_succeeds(
    rewards: list[float], rate: float | None, outside: bool
) -> None:
    assert CURRICULUM.rate(rewards) == rate
    assert CURRICULUM.is_outside(rate) == outside


def test_the_first_pass_skips_nothing_and_later_ones_the_share_of_skip() -> None:
    assert not any(CURRICULUM.may_skip(1, position, 0) for position in range(1000))
    skipped = [CURRICULUM.may_skip(1, position, number) for number in (1, 2) for position in range(10_000)]
    assert sum(skipped) / len(skipped) == pytest.approx(0.4, abs=0.02)


def test_the_coin_is_thrown_for_each_seed_task_and_pass() -> None:
    turns = [(seed, position, number) for seed in (0, 1) for position in range(50) for number in (1, 2)]
    coins = [coin(*turn) for turn in turns]
    assert len(set(coins)) == len(turns)
    assert all(0 <= one < 1 for one in coins)
    assert coins == [coin(*turn) for turn in turns]


SIZES = AdaptiveGroup(least=4, most=16, first=8, chance=0.9, success=1.0, groups=2)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_chance_of_a_mixed_group_is_that_of_all_outcomes(n: int) -> None:
    rate = 0.3
    expected = sum(
        rate ** sum(outcome) * (1 - rate) ** (n - sum(outcome))
        for outcome in product((0, 1), repeat=n)
        if len(set(outcome)) == 2
    )
    assert mixed_chance(n, rate) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("rate", "size"), [(None, 8), (0.0, 16), (1.0, 16), (0.5, 5), (0.3, 7), (0.7, 7), (0.2, 11), (0.1, 16)]
)
def test_hard_tasks_get_larger_groups(rate: float | None, size: int) -> None:
    assert SIZES.size(rate) == size


@given(st.integers(2, 12), st.integers(0, 40), st.floats(0, 1), st.floats(0.01, 0.99))
def test_a_size_is_the_least_that_is_enough(least: int, more: int, rate: float, chance: float) -> None:
    sizes = AdaptiveGroup(least=least, most=least + more, first=least, chance=chance, success=1.0, groups=1)
    n = sizes.size(rate)
    assert least <= n <= least + more
    assert n == least + more or mixed_chance(n, rate) >= chance
    assert n == least or mixed_chance(n - 1, rate) < chance
