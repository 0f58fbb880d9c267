"""Messages as JSON of bounded size, whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.export.spans.message_texts import FRAME_BYTES, answers, instructions, messages
from agentrl.export.spans.span_parts import CUT

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_messages_have_the_conventions_shape() -> None:
    given_messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning_content": "hm", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "user", "content": ""},
        "a prompt",
    ]
    found = json.loads(messages(given_messages, 10_000) or "")
    assert found == [
        {"role": "user", "parts": [{"type": "text", "content": "ab"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "call_1", "name": "add", "arguments": '{"a": 1}'},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "2"}]},
        {"role": "user", "parts": [{"type": "text", "content": '[{"type":"image_url","image_url":{"url":"u"}}]'}]},
        {"role": "user", "parts": [{"type": "text", "content": "a prompt"}]},
    ]
    answer = json.loads(messages([{"role": "assistant", "content": "x"}], 1000, "stop") or "")
    assert answer[0]["finish_reason"] == "stop"
    assert json.loads(instructions([{"role": "system", "content": "s"}], 1000) or "") == [
        {"type": "text", "content": "s"}
    ]
    assert messages([], 1000) is None


@given(st.lists(st.fixed_dictionaries({"content": st.text(max_size=300)}), max_size=30), st.integers(64, 2000))
def test_the_size_holds_for_any_text(given_messages: list[Any], size: int) -> None:
    found = messages(given_messages, size)
    if found is None:
        return
    kept = [part["content"] for message in json.loads(found) for part in message["parts"]]
    assert sum(len(one.removesuffix(CUT).encode()) + FRAME_BYTES for one in kept) <= size + FRAME_BYTES
    said = [message["content"].replace("\0", "\ufffd") for message in given_messages if message["content"]]
    assert all(whole.startswith(one.removesuffix(CUT)) for one, whole in zip(kept, said, strict=False))


def test_long_text_is_cut_between_characters_and_the_rest_is_left_out() -> None:
    found = json.loads(messages([{"role": "user", "content": "€" * 100}, {"role": "user", "content": "b"}], 100) or "")
    assert found == [{"role": "user", "parts": [{"type": "text", "content": "€" * 17 + CUT}]}]


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"role": "assistant", "content": "x"}, ["x"]),
        ({"choices": [{"message": {"role": "assistant", "content": "x"}}, {"message": {"content": "y"}}]}, ["x", "y"]),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, ["x"]),
        ({"events": [1]}, ['{"events":[1]}']),
        ({"choices": "?"}, ['{"choices":"?"}']),
        ({}, []),
        (None, []),
    ],
)
def test_answers_of_other_models_are_read_as_their_servers_give_them(answer: Any, content: list[str]) -> None:
    found = json.loads(messages(answers(answer), 1000, "stop") or "[]")
    assert [message["parts"][0]["content"] for message in found] == content
