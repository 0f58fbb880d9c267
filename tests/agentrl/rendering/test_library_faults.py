"""Replies that the `renderers` library parses incorrectly, which is why agentrl has parsers of its own.

A test that fails here says that the library has changed: compare again, and drop what it has mended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.rendering.templates.family_renderer import FamilyRenderer

from .family_models import load_model
from .outputs import parse
from .subjects import QUESTION, TOOLS

XML = "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>"
    '{"expression": "1"}<|tool_call_end|><|tool_calls_section_end|>'
)


def read(path: Path, family: str, text: str) -> tuple[Any, Any]:
    """A reply as the library reads it, and as we do."""
    model: FamilyRenderer = load_model(path / "model", family)
    prompt = model.render(QUESTION, TOOLS)
    ids = [*model._encode(text), model.stop_token_ids[0]]
    theirs = model._inner.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    return theirs, parse(model, TOOLS, prompt, ids)[0]


@pytest.mark.parametrize(
    ("name", "key", "value", "theirs", "ours"),
    [
        ("calc", "expression", "  a  ", "a", '{"expression": "  a  "}'),
        ("calc", "expression", "a\n", "a", '{"expression": "a\\n"}'),
        ("look_up", "b", "True", "True", '{"b": true}'),
        ("look_up", "z", "None", "None", '{"z": null}'),
        ("look_up", "n", "NaN", "nan", '{"n": "NaN"}'),
    ],
)
def test_the_library_changes_values_of_arguments(
    tmp_path: Path, name: str, key: str, value: str, theirs: str, ours: str
) -> None:
    found, read_by_us = read(tmp_path, "prime-qwen3", XML.format(name, key, value))
    assert str(found.tool_calls[0].arguments[key]) == theirs
    assert read_by_us.tool_calls[0].arguments == ours


def test_a_call_without_a_closing_tag_has_no_arguments(tmp_path: Path) -> None:
    broken = XML.format("calc", "expression", "1").replace("\n</parameter>", "")
    theirs, ours = read(tmp_path, "prime-qwen3", broken)
    assert theirs.tool_calls[0].arguments == {}
    assert (ours.tool_calls, ours.content) == ([], broken)


@pytest.mark.parametrize("family", ["kimi-k2"])
def test_text_behind_calls_is_lost(tmp_path: Path, family: str) -> None:
    theirs, ours = read(tmp_path, family, f"Before.{KIMI}After.")
    assert theirs.content == "Before."
    assert ours.content == "Before.After."


def test_a_marker_token_in_an_argument_ends_the_call(tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "calc", "arguments": {"expression": "a </tool_call> b"}}\n</tool_call>'
    theirs, ours = read(tmp_path, "qwen3-vl", text)
    assert theirs.tool_calls[0].status != "ok"
    assert ours.tool_calls[0].arguments == '{"expression": "a </tool_call> b"}'


def test_a_second_call_of_llama_makes_both_text(tmp_path: Path) -> None:
    call = '{"name": "calc", "parameters": {"expression": "1"}}'
    theirs, ours = read(tmp_path, "llama-3", f"{call}; {call}")
    assert theirs.tool_calls == []
    assert len(ours.tool_calls) == 2


def test_a_name_with_white_space_is_half_a_name(tmp_path: Path) -> None:
    header = "<|end|><|start|>assistant to=functions.look up<|channel|>commentary json<|message|>"
    theirs, ours = read(tmp_path, "gpt-oss", header + "{}<|end|>")
    assert theirs.tool_calls[0].name == "look"
    assert ours.tool_calls == []
