"""What a reward function may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.rollout.rewards.function_value import BadValue, value_of, values_of_batch


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2.0])[0], 2.0),
        (None, None),
        ({"score": 1, "acc": 7}, 1.0),
        ({"form": 0.5, "length": -1}, {"form": 0.5, "length": -1.0}),
    ],
)
def test_a_value_is_read(result: Any, value: Any) -> None:
    assert value_of(result) == value


@pytest.mark.parametrize(
    "result", ["1", float("nan"), float("inf"), 10**400, [], {}, {1: 2.0}, {"x" * 36: 1.0}, {"a": "b"}, object()]
)
def test_anything_else_is_refused(result: Any) -> None:
    with pytest.raises(BadValue, match="returned"):
        value_of(result)


def test_a_batch_has_one_value_for_each_answer() -> None:
    assert values_of_batch([1, None, {"score": 0}], 3) == [1.0, None, 0.0]
    assert values_of_batch(np.array([1.0, 0.0]), 2) == [1.0, 0.0]
    for bad in ([1.0], 1.0, "ab", [1.0, float("nan")]):
        with pytest.raises(BadValue):
            values_of_batch(bad, 2)
