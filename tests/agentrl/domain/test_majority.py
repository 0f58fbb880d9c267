"""maj@k against the mean over all choices of k samples, with ties broken uniformly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.majority import MOST_SAMPLES, majority_at

SAMPLES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.floats(-2, 2, allow_nan=False, width=16)),
    min_size=1,
    max_size=8,
)


def by_hand(k: int, samples: list[tuple[str | None, float]]) -> float:
    """The mean over all choices of the mean over the answers with the most votes of their votes' mean reward."""
    of_choices = []
    for choice in combinations([(number if a is None else a, r) for number, (a, r) in enumerate(samples)], k):
        votes = Counter(answer for answer, _ in choice)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        of_choices.append(fmean(fmean(r for a, r in choice if a == winner) for winner in winners))
    return fmean(of_choices)


@given(SAMPLES)
def test_it_is_the_mean_over_all_choices(samples: list[tuple[str | None, float]]) -> None:
    answers, rewards = [a for a, _ in samples], [r for _, r in samples]
    for k in range(1, len(samples) + 1):
        assert majority_at(k, answers, rewards) == pytest.approx(by_hand(k, samples), abs=1e-9)


@given(SAMPLES)
def test_the_order_of_the_samples_does_not_matter_and_one_sample_is_the_mean(
    samples: list[tuple[str | None, float]],
) -> None:
    answers, rewards = [a for a, _ in samples], [r for _, r in samples]
    assert majority_at(1, answers, rewards) == pytest.approx(fmean(rewards), abs=1e-9)
    k = (len(samples) + 1) // 2
    assert majority_at(k, answers, rewards) == pytest.approx(majority_at(k, answers[::-1], rewards[::-1]), abs=1e-9)


def test_the_majority_wins_and_a_tie_is_broken_evenly() -> None:
    assert majority_at(5, ["x", "x", "x", "y", "z"], [1, 1, 1, 0, 0]) == 1.0
    assert majority_at(5, ["x", "y", "y", "y", "z"], [1, 0, 0, 0, 0]) == 0.0
    assert majority_at(4, ["x", "x", "y", "y"], [1, 1, 0, 0]) == pytest.approx(0.5)
    assert majority_at(3, ["x", "x", "y"], [1.0, 0.5, 0.0]) == pytest.approx(0.75)  # the mean of the winner's votes


def test_samples_without_an_answer_never_vote_together() -> None:
    assert majority_at(5, ["x", "x", None, None, None], [1, 1, 0, 0, 0]) == 1.0
    assert majority_at(3, ["x", None, None], [1, 0, 0]) == pytest.approx(1 / 3)


def test_many_samples_are_exact_and_finite() -> None:
    right, n, k = 150, MOST_SAMPLES, 3
    want = sum(comb(right, i) * comb(n - right, k - i) for i in (2, 3)) / comb(n, k)
    assert majority_at(k, ["x"] * right + ["y"] * (n - right), [1.0] * right + [0.0] * (n - right)) == pytest.approx(
        want
    )
    spread = [str(number % 7) for number in range(64)]
    rewards = [float(answer == "0") for answer in spread]
    assert 0 < majority_at(32, spread, rewards) < majority_at(64, spread, rewards) == pytest.approx(1.0)
    assert 0 <= majority_at(100, [str(i % 2) for i in range(n)], [float(i % 2) for i in range(n)]) <= 1
