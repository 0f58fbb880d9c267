"""How many tokens two sequences share, at their beginning and all over."""

from __future__ import annotations

import pytest

from agentrl.diagnosis.forks import common_subsequence, shared_tokens


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [1], 0),
        ([1], [2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 5, 4], 2),
        ([9, 2, 3], [1, 2, 3], 0),
        ([*range(1000), -1], [*range(1000), -2], 1000),
    ],
)
def test_sequences_share_their_tokens_up_to_the_first_that_differs(one, other, expected):
    assert shared_tokens(one, other) == shared_tokens(other, one) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [1], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 9, 3], [1, 2, 3], 2),
        ([3, 2, 1], [1, 2, 3], 1),
        ([1, 2, 3, 4, 5], [3, 1, 4, 2, 5], 3),
        ([7, 7, 7], [7, 7], 2),
        ([-1, *range(500), -1], [*range(250), -2, *range(250, 500)], 500),
    ],
)
def test_the_longest_common_subsequence_is_found(one, other, expected):
    assert common_subsequence(one, other) == common_subsequence(other, one) == expected
