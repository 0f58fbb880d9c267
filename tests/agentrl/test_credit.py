"""Returns of a session's calls: tables."""

import pytest

from agentrl.credit import turn_returns


@pytest.mark.parametrize(
    ("calls", "session", "discount", "expected"),
    [
        ([], 1.0, 1.0, []),
        ([None, None], 1.0, 1.0, [1.0, 1.0]),
        ([None, None], 1.0, 0.5, [0.5, 1.0]),
        ([0.2, None], None, 0.5, [0.2, 0.0]),
        ([0.2, 0.4], 1.0, 0.5, [0.9, 1.4]),
        ([1.0, 2.0, 3.0], None, 0.0, [1.0, 2.0, 3.0]),
    ],
)
def test_turn_returns(calls, session, discount, expected):
    assert turn_returns(calls, session, discount) == pytest.approx(expected)
