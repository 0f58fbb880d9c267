"""Invalid messages and tools are refused with the path of the field; messages that SDKs send are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.rendering.validation import validate_messages, validate_tools

from .conftest import call, tool

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "hi"}, "messages[1].role"),
        ({"role": "usr", "content": "hi"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": "\ud800"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 3}, "messages[1].name"),
        ({"role": "tool", "content": "4"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [call("f", "{}")]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[1].audio"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call("", "{}")]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call("f", "{}", "")]}, "messages[1].tool_calls[0].id"),
        (
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": 3}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "x", "type": "custom"}]}, "messages[1].tool_calls[0].type"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused(message: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate_messages([USER, message])
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_messages", param)
    assert param in str(refused.value)


@pytest.mark.parametrize("messages", [None, [], "hi", {}])
def test_a_conversation_that_is_no_list_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        validate_messages(messages)
    assert refused.value.param == "messages"


def test_messages_of_sdks_are_accepted() -> None:
    validate_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "héllo", "name": "bob"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call("f", '{"a": 1}')]},
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": None, "annotations": [], "function_call": None},
            {"role": "assistant", "reasoning_content": "hm"},
        ]
    )


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([tool("f"), {"type": "function", "function": {}}], "tools[1].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"properties": [1]}}}], "tools[0].function.parameters.properties"),
    ],
)
def test_a_tool_that_cannot_be_rendered_is_refused(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate_tools(tools)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_tools", param)


def test_valid_tools_are_accepted() -> None:
    validate_tools(None)
    validate_tools([tool("f", a="string"), {"type": "function", "function": {"name": "g"}}])
