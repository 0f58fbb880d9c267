"""Which tasks a pass skips."""

from __future__ import annotations

import pytest

from agentrl.domain.curriculum import Curriculum, coin

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
