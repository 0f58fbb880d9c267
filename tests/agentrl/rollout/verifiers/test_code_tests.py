"""Code of answers against tests, in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.verifiers.code_tests import CodeTests

ADD = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
DOUBLE = "```python\nprint(2 * int(input()))\n```"
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "4", "output": "8"}, {"input": "x", "output": "0"}]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (ADD, 1.0),
        (ADD.replace("a + b", "a - b"), 0.0),
        ("```python\nimport os\nos._exit(0)\n```", 0.0),
        ("```python\nraise SystemExit(0)\n```", 0.0),
        ("I cannot", 0.0),
    ],
)
def test_assertions(answer: str, value: float) -> None:
    assert CodeTests()(answer, ASSERTS) == value


def test_cases() -> None:
    assert CodeTests()(DOUBLE, CASES[:2]) == 1.0
    assert CodeTests()(DOUBLE, CASES) == 0.0
    assert CodeTests(partial=True)(DOUBLE, CASES) == pytest.approx(2 / 3)
    assert CodeTests()(DOUBLE, {"inputs": ["1"], "outputs": ["2"]}) == 1.0


def test_a_program_that_does_not_end_fails_in_time() -> None:
    assert CodeTests(time_s=1.0, partial=True)("```python\nwhile True: pass\n```", CASES) == 0.0


@pytest.mark.parametrize("tests", [[], [{"in": "1"}], 7, {"inputs": ["1"], "outputs": []}])
def test_tests_of_another_form_are_an_error(tests: Any) -> None:
    with pytest.raises(Unusable, match="tests: "):
        CodeTests()(DOUBLE, tests)
