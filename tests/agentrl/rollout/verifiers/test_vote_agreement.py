"""Scores of several votes, and their agreement."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.verifiers.vote_agreement import AGGREGATES, disagreement, pairwise_agreement

votes = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9)


@given(votes)
def test_agreement_is_the_share_of_equal_pairs(scores: list[float]) -> None:
    pairs = list(permutations(scores, 2))
    expected = np.mean([a == b for a, b in pairs]) if pairs else 1.0
    assert pairwise_agreement(scores) == pytest.approx(expected, abs=1e-12)
    found = disagreement(scores)
    assert found == {"agreement": pairwise_agreement(scores), "std": pytest.approx(np.std(scores), abs=1e-9)}


@given(votes)
def test_mean_and_median_are_those_of_numpy(scores: list[float]) -> None:
    assert AGGREGATES["mean"](scores) == pytest.approx(np.mean(scores), abs=1e-12)
    assert AGGREGATES["median"](scores) == pytest.approx(np.median(scores), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "value"), [([1.0], 1.0), ([0, 1, 1], 1), ([0.2, 0.9, 0.2, 0.9], 0.2), ([0.1, 0.5, 0.9], 0.5)]
)
def test_the_majority_is_the_most_frequent_score(scores: list[float], value: float) -> None:
    assert AGGREGATES["majority"](scores) == value
