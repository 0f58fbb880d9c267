"""Equal returns: as wide as rounding, no wider."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.ties import tied


@given(st.lists(st.floats(-1e6, 1e6), max_size=8), st.data())
def test_returns_of_the_same_rewards_in_any_order_are_tied(values, data):
    orders = [data.draw(st.permutations(values)) for _ in range(4)]
    assert tied([sum(order) for order in orders])


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([], True),
        ([0.7], True),
        ([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], True),
        ([0.0, 1e-9], True),
        ([0.0, 2e-9], False),
        ([-1e6, -1e6 - 1e-4], True),
        ([-1e6, -1e6 - 1e-2], False),
        ([0.5, 0.5, 0.6], False),
    ],
)
def test_ties_are_as_wide_as_the_rounding(returns, expected):
    assert tied(returns) is expected
