"""Mathematical answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.verifiers.math_answer import MathAnswer


@pytest.fixture(scope="module")
def judge() -> MathAnswer:
    return MathAnswer()


@pytest.mark.parametrize(
    ("completion", "truth", "value"),
    [
        (r"So $x = \boxed{\frac{1}{2}}$.", "0.5", 1.0),
        (r"\boxed{72}", "He sold 48/2 = 24. #### 72", 1.0),
        ("The answer is 72.", 72, 1.0),
        ("The answer is 71.", "72", 0.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{(1, 2)}", "$(1,2)$", 1.0),
        ("I do not know", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_values_are_compared(judge: MathAnswer, completion: str, truth: Any, value: float) -> None:
    assert judge(completion, truth) == value


def test_it_needs_no_signal(judge: MathAnswer) -> None:
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(judge(r"\boxed{3}", "3")))
    thread.start()
    thread.join()
    assert values == [1.0]


def test_an_expected_answer_that_is_no_mathematics_is_an_error(judge: MathAnswer) -> None:
    with pytest.raises(Unusable, match="not a mathematical expression"):
        judge("5", "")


@pytest.mark.parametrize(
    ("completion", "truth", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", "1/2"),
        (r"It is \boxed{0.50}.", "1/2", "1/2"),
        (r"\boxed{0.25}", "72", "1/4"),
        (r"\boxed{\frac{1}{4}}", "72", "1/4"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", "2*sqrt(2)"),
        ("I do not know", "5", None),
    ],
)
def test_equal_expressions_are_one_answer(judge: MathAnswer, completion: str, truth: str, answer: str | None) -> None:
    assert judge(completion, truth).answer == answer
