"""How many tokens two sequences share."""

from __future__ import annotations

import pytest

from agentrl.doctor.forks import shared_tokens


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
