"""What a reward function may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.rollout.rewards.function_value import NOT_FOUND, BadValue, Graded, answer_in, listed_of_batch, value_of


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
    assert [value_of(one) for one in listed_of_batch([1, None, {"score": 0}], 3)] == [1.0, None, 0.0]
    assert listed_of_batch(np.array([1.0, 0.0]), 2) == [1.0, 0.0]
    for bad in ([1.0], 1.0, "ab"):
        with pytest.raises(BadValue):
            listed_of_batch(bad, 2)


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (1.0, None),
        ({"score": 1.0}, None),
        ({"answer": 1.0, "format": 0.5}, None),  # named rewards
        ({"score": 1.0, "answer": " 4\n2 "}, "4 2"),
        ({"score": 1.0, "pred": 42}, "42"),
        ({"score": 0.0, "answer": None}, NOT_FOUND),
        ({"score": 0.0, "answer": " "}, NOT_FOUND),
        (Graded(1.0, "B"), "B"),
        (Graded(0.0, None), NOT_FOUND),
    ],
)
def test_an_answer_is_read_beside_the_value(result: Any, answer: str | None) -> None:
    assert answer_in(result) == answer
    assert type(value_of(result)) in (float, dict)
