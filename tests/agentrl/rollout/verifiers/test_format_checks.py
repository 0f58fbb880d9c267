"""The form of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.rewards.function_value import Graded
from agentrl.rollout.verifiers.format_checks import json_schema, regex, think_format


def test_regex() -> None:
    assert regex("x\nAnswer: 7", r"^Answer: \d+$") == 1.0
    assert regex("x\nAnswer: 7", r"Answer: \d+", full=True) == 0.0
    assert regex("none", "Answer") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\nhm\n</think>\n\n7", 1.0),
        ("7", 0.0),
        ("<think>hm</think>", 0.0),
        ("<think></think>7", 0.0),
        ("<think>a</think><think>b</think>7", 0.0),
        ("so <think>a</think>7", 0.0),
        ("<think>hm 7", 0.0),
    ],
)
def test_think_format(text: str, value: float) -> None:
    assert think_format(text) == value


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"n": 1}', 1.0), ('Here:\n```json\n{"n": 1}\n```', 1.0), ('{"n": "1"}', 0.0), ("{", 0.0), ("[" * 10**5, 0.0)],
)
def test_json_schema(text: str, value: float) -> None:
    assert json_schema(text, SCHEMA) == value


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x.json"}])
def test_an_invalid_schema_is_an_error(schema: Any) -> None:
    with pytest.raises(Unusable, match="schema"):
        json_schema("{}", schema)


@pytest.mark.parametrize(
    ("text", "pattern", "full", "value", "answer"),
    [
        ("ANSWER: 1\nANSWER: 2", r"^ANSWER: (\d)$", False, 1.0, "2"),
        ("none", r"^ANSWER: (\d)$", False, 0.0, None),
        ("<a>7</a>", "<a>(.*)</a>", True, 1.0, "7"),
    ],
)
def test_the_group_of_a_pattern_is_the_answer(
    text: str, pattern: str, full: bool, value: float, answer: str | None
) -> None:
    found = regex(text, pattern=pattern, full=full)
    assert isinstance(found, Graded)
    assert (found, found.answer) == (value, answer)
    assert not isinstance(regex(text, pattern="x"), Graded)
