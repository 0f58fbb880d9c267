"""Rows of files: every shape that is read, and what is refused, by row and field."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from agentrl.errors import UserError
from agentrl.models import resolve_model
from agentrl.rendering import Renderer, load_renderer
from agentrl.trainer.tuning import data_files
from agentrl.trainer.tuning.items import Item

ASK = {"role": "user", "content": "abcd"}
ANSWER = {"role": "assistant", "content": "dcba"}
TALK = {"messages": [ASK, ANSWER]}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(resolve_model("tiny"))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(renderer: Renderer, item: Item) -> list[str]:
    """What is trained of each sample."""
    return [renderer.decode(s.tokens.input_ids[s.tokens.loss_mask].tolist()) for s in item]


def ids(item: Item | None) -> list[list[int]]:
    assert item is not None
    return [sample.tokens.input_ids.tolist() for sample in item]


@pytest.mark.parametrize(
    "row",
    [
        TALK,
        {"prompt": [ASK], "completion": [ANSWER]},
        {"prompt": "abcd", "completion": "dcba", "source": "somewhere"},
        {"messages": json.dumps(TALK["messages"])},
        TALK | {"tools": None},
    ],
)
def test_rows_that_spell_one_conversation_give_the_same_item(renderer: Renderer, row: dict[str, Any]) -> None:
    item = data_files.conversation(renderer, row, "1")
    assert texts(renderer, item) == ["dcba<|im_end|>"]
    assert ids(item) == ids(data_files.conversation(renderer, TALK, "1"))


def test_recorded_tokens_stay_unchanged(renderer: Renderer) -> None:
    (sample,) = data_files.conversation(
        renderer, {"input_ids": [5, 6, 7, 8], "loss_mask": [False, False, True, True]}, "1"
    )
    assert sample.tokens.input_ids.tolist() == [5, 6, 7, 8]
    assert sample.tokens.loss_mask.tolist() == [False, False, True, True]


def test_tools_are_in_the_prompt(renderer: Renderer) -> None:
    with_tools, without = (data_files.conversation(renderer, TALK | more, "1") for more in ({"tools": [TOOL]}, {}))
    assert "calc" in renderer.decode(ids(with_tools)[0])
    assert "calc" not in renderer.decode(ids(without)[0])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "no"}]},
        {"prompt": "abcd", "chosen": "dcba", "rejected": "no"},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER | {"content": "no"}]},
    ],
)
def test_rows_that_spell_one_pair_give_the_same_item(renderer: Renderer, row: dict[str, Any]) -> None:
    item = data_files.preference(renderer, row, "1")
    assert item is not None
    assert texts(renderer, item) == ["dcba<|im_end|>", "no<|im_end|>"]
    assert [set(s.advantages.tolist()) for s in item] == [{0.0, 1.0}, {0.0, -1.0}]
    assert {s.tokens.group_id for s in item} == {"1"}


def test_the_common_beginning_of_two_conversations_is_the_prompt(renderer: Renderer) -> None:
    again = [ASK, ANSWER, ASK]
    item = data_files.preference(
        renderer, {"chosen": [*again, ANSWER], "rejected": [*again, ANSWER | {"content": "no"}]}, "1"
    )
    assert item is not None
    assert texts(renderer, item) == ["dcba<|im_end|>", "no<|im_end|>"]


def test_a_pair_of_equal_answers_gives_no_item(renderer: Renderer) -> None:
    assert data_files.preference(renderer, {"prompt": "a", "chosen": "b", "rejected": "b"}, "1") is None


def test_parquet_and_jsonl_give_the_same_items(renderer: Renderer, tmp_path: Path) -> None:
    rows = [TALK, {"messages": [ASK, ANSWER, ASK, ANSWER | {"content": "é\n"}]}]
    make = partial(data_files.conversation, renderer)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    plain = [ids(item) for item in data_files.read(write(tmp_path / "rows.jsonl", rows), make)]
    assert [ids(item) for item in data_files.read(tmp_path / "rows.parquet", make)] == plain
    assert len(plain) == 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"mesages": []}, "row 2: needs messages, or prompt and completion; it has mesages"),
        ({"messages": "hello"}, "row 2: messages: must be a list of messages, got str"),
        ({"completion": "x"}, "row 2: prompt: must be a list of messages, got nothing"),
        ({"messages": [ASK, {"role": "assistant"}, {"role": "robot"}]}, r"row 2: messages\[2\].role: unknown role"),
        (TALK | {"tools": [{"type": "function"}]}, r"row 2: tools\[0\].function"),
        (TALK | {"tools": "{"}, "row 2: tools: is not valid JSON"),
        (TALK | {"tools": "[" * 100_000}, "row 2: tools: is not valid JSON"),
        ({"input_ids": [1, 2], "loss_mask": [True]}, "row 2: loss_mask: must be a list as long as input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [True, True]}, "row 2: loss_mask: must select a token, and not the first"),
        ({"input_ids": [1, "2"], "loss_mask": [False, True]}, "row 2: input_ids: must be token ids"),
        ([TALK], "line 2 must be an object, got list"),
    ],
)
def test_a_bad_row_is_named(renderer: Renderer, tmp_path: Path, row: Any, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", [TALK, row])
    with pytest.raises(UserError, match=says) as caught:
        list(data_files.read(path, partial(data_files.conversation, renderer)))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 1: needs rejected; it has prompt, chosen"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [ASK]},
            "row 1: rejected: messages: there is no assistant",
        ),
        ({"chosen": [ASK, ANSWER], "rejected": [ASK]}, "row 1: rejected: messages: there is no assistant message"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "row 1: rejected: must be a list of messages, got int"),
    ],
)
def test_a_bad_pair_is_named(renderer: Renderer, tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(data_files.read(write(tmp_path / "rows.jsonl", [row]), partial(data_files.preference, renderer)))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.jsonl", None, "does not exist"),
        ("rows.csv", "a,b", "ends neither in .jsonl nor in .parquet"),
        ("rows.jsonl", '{"messages": ', "line 1 is not valid JSON"),
        ("rows.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        ("rows.parquet", "no parquet", "is not a Parquet file"),
    ],
)
def test_a_bad_file_is_refused(renderer: Renderer, tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"data.file: .*{says}") as caught:
        list(data_files.read(tmp_path / name, partial(data_files.conversation, renderer)))
    assert "\n" not in str(caught.value)
