"""Columns are renamed, templates filled, prompts measured; an error names the row."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.data.prompt_length import measure_of
from agentrl.data.task_shape import Shape
from agentrl.domain.schemas import Json
from agentrl.errors import UserError


def shaped(row: Any, measure: Any = None, **settings: Any) -> Json | None:
    text = Shape(TaskSource(path="t.jsonl", **settings), "tasks", measure)(row, lambda: "t.jsonl line 3")
    return None if text is None else dict(orjson.loads(text))


def test_columns_are_renamed_removed_or_kept() -> None:
    row = {"question": "q", "image": b"x", "answer": 4}
    assert shaped(row, columns={"question": "prompt", "image": None}) == {"prompt": "q", "answer": 4}
    assert shaped({"a": 1, "b": 2}, columns={"a": "b", "b": "a"}) == {"a": 2, "b": 1}


def test_a_template_sees_the_renamed_columns() -> None:
    row = {"x": 2, "ys": [1, 2]}
    assert shaped(row, columns={"x": "n"}, prompt="{{ n + 1 }}: {{ ys | join(', ') }}\n")["prompt"] == "3: 1, 2\n"  # type: ignore[index]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ x }}?"}]
    assert shaped(row, messages=messages)["messages"][1] == {"role": "user", "content": "2?"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"a": 1}, {"columns": {"b": "c"}}, "t.jsonl line 3 has no column 'b'; it has a"),
        ({"a": 1}, {"prompt": "{{ b }}"}, "line 3 does not fit the template: 'b' is undefined"),
        ({"a": 1}, {"prompt": "{{ a.x.y }}"}, "does not fit the template"),
        ({"a": 1}, {"prompt": "{{ a | join }}"}, "does not fit the template"),
        ({"a": 1}, {"prompt": "{{ a"}, "prompt is not a Jinja template"),
        ({"a": 1}, {"prompt": "{{ ''.__class__.__mro__ }}"}, "does not fit the template: .*unsafe"),
        ({"a": b"x"}, {}, r"column 'a' cannot be stored as JSON: .*\(`columns: \{a: null\}` removes it\)"),
        ({"a": "\ud800"}, {}, "column 'a' cannot be stored"),
        ({"a": 2**70}, {}, "column 'a' cannot be stored"),
        ({1: "x"}, {}, "cannot be stored as JSON"),
        (["x"], {}, "line 3 is list, not a mapping"),
    ],
)
def test_a_row_that_makes_no_task_is_named(row: Any, settings: Json, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shaped(row, **settings)


def test_dates_are_text() -> None:
    assert shaped({"a": date(2026, 1, 2)}) == {"a": "2026-01-02"}


@pytest.fixture
def measure(tiny_model: Path) -> Any:
    return measure_of([TaskSource(path="t.jsonl", max_prompt_tokens=1)], lambda: tiny_model)


def test_a_long_prompt_is_dropped_or_truncated_or_an_error(measure: Any) -> None:
    user = {"role": "user", "content": "word " * 100}
    task: Json = {"messages": [{"role": "system", "content": "Be brief."}, user], "answer": 1}
    length = measure(task["messages"])
    assert shaped(task, measure, max_prompt_tokens=length) == task
    assert shaped(task, measure, max_prompt_tokens=length - 1) is None
    cut = shaped(task, measure, max_prompt_tokens=length - 20, too_long="truncate")
    assert cut is not None
    assert cut["messages"][0] == task["messages"][0]
    assert user["content"].startswith(cut["messages"][1]["content"])
    assert length - 23 < measure(cut["messages"]) <= length - 20
    with pytest.raises(UserError, match=rf"line 3 has a prompt of {length} tokens, max_prompt_tokens is 5"):
        shaped(task, measure, max_prompt_tokens=5, too_long="fail")
    with pytest.raises(UserError, match="longer than 5 tokens even without its longest text"):
        shaped(task, measure, max_prompt_tokens=5, too_long="truncate")
    with pytest.raises(UserError, match="no prompt that can be measured: it has neither `messages` nor `prompt`"):
        shaped({"a": 1}, measure, max_prompt_tokens=5)


def test_a_prompt_that_is_text_stays_text(measure: Any) -> None:
    cut = shaped({"prompt": "word " * 50}, measure, max_prompt_tokens=30, too_long="truncate")
    assert cut is not None
    assert ("word " * 50).startswith(cut["prompt"])
    assert measure([{"role": "user", "content": cut["prompt"]}]) <= 30
