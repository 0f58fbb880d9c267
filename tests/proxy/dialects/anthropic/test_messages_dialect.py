"""Anthropic Messages: conversations and tools become chat messages and functions."""

import json

from agentrl.domain.schemas import UNREAD
from agentrl.rendering.validation import validate_messages

from .message_bodies import BLOCK, CALC, DIALECT, EPHEMERAL, HI, IMAGE, PDF, REFERENCE, USE, decode, user

NOTES = {"name": "notes", "description": "Keeps notes.", "input_schema": {"type": "object", "properties": {}}}
REFERENCE_IN_SYSTEM = {"type": "tool_reference", "name": "notes"}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_conversation_becomes_chat_messages():
    blocks = [
        {"type": "thinking", "thinking": "well", "signature": ""},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": "Let me ", "citations": None},
        {"type": "text", "text": "see."},
        {"type": "tool_use", "id": "c1", "name": "calc", "input": {"x": "1"}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "c2", "name": "calc", "input": {}, "cache_control": EPHEMERAL},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "text", "text": "Go ", "cache_control": EPHEMERAL},
        {"type": "text", "text": "on."},
    ]
    request = decode(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": EPHEMERAL}],
        messages=[HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
    )
    validate_messages(request.messages)
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        HI,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "well",
            "tool_calls": [call("c1", "calc", '{"x": "1"}'), call("c2", "calc", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "Go on."},
    ]


def test_neighbours_on_the_assistants_side_are_one_message_and_users_messages_stay_apart():
    parts = [
        {"role": "assistant", "content": "Let me see."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "calc", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
        {"role": "user", "content": "and?"},
        {"role": "user", "content": []},
        {"role": "system", "content": "Be quick."},
        HI,
    ]
    assert decode(messages=[HI, *parts]).messages == [
        HI,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("c1", "calc", "{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": "and?"},
        {"role": "user", "content": ""},
        {"role": "system", "content": "Be quick."},
        HI,
    ]


def test_an_empty_system_prompt_is_none():
    assert decode(system="").messages == decode(system=[]).messages == [HI]


def test_a_tools_input_is_kept_as_it_is_written():
    body = rb"""{"model": "m", "max_tokens": 1, "messages": [
        {"role": "assistant", "content": [{"input": {"n" : 123456789012345678901234567890, "d": 1.10}, "id": "c",
         "type": "tool_use", "name": "f"}]}, {"role": "user", "content": "hi"}]}"""
    (turn, _) = DIALECT.decode(body).messages
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"n" : 123456789012345678901234567890, "d": 1.10}'


def test_a_deferred_tool_comes_into_the_conversation_where_it_is_loaded():
    found = {"type": "tool_result", "tool_use_id": "c", "content": [REFERENCE]}
    request = decode(
        tools=[CALC, NOTES | {"defer_loading": True}],
        messages=[HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [found]}],
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["calc"]
    assert [tool["function"]["name"] for tool in request.callable_tools] == ["calc", "notes"]
    validate_messages(request.messages)
    shown = request.messages[-1]["content"]
    assert shown.startswith("<functions>\n<function>{")
    assert json.loads(shown[shown.index("{") : shown.rindex("}") + 1])["description"] == "Keeps notes."
    assert decode(tools=[CALC, NOTES | {"defer_loading": True}]).callable_tools == decode(tools=[CALC]).callable_tools


def test_system_messages_bring_tools_in_and_take_them_away():
    defined = {"type": "tool_definition", "definition": NOTES}
    request = decode(
        tools=[CALC],
        messages=[
            HI,
            {"role": "system", "output_config": {"effort": "low"}},
            {"role": "system", "content": [{"type": "tool_addition", "tool": defined}, BLOCK]},
            {"role": "system", "content": [{"type": "tool_addition", "tool": REFERENCE_IN_SYSTEM}]},
            {"role": "system", "content": [{"type": "tool_removal", "tool": REFERENCE_IN_SYSTEM}]},
        ],
    )
    added, again, removed = (message["content"] for message in request.messages[1:])
    assert added.startswith("<functions>")
    assert added.endswith("</functions>\nx")
    assert "Keeps notes." in again
    assert removed == "The tool notes is no longer available.\n"
    assert [tool["function"]["name"] for tool in request.loaded] == ["notes"]


def test_a_system_message_with_clear_at_ends_with_its_turn():
    fleeting = {"role": "system", "content": "Now.", "clear_at": "next_user_message"}
    roles = [message["role"] for message in decode(messages=[HI, fleeting]).messages]
    assert roles == ["user", "system"]
    answered = [HI, fleeting, {"role": "assistant", "content": "yes?"}, HI]
    assert [message["role"] for message in decode(messages=answered).messages] == ["user", "assistant", "user"]


def test_tools_of_anthropics_servers_are_left_out():
    request = decode(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, CALC])
    assert [tool["function"]["name"] for tool in request.tools] == ["calc"]
    assert request.left_out == ["web_search"]
    assert decode(tools=[{"type": "mcp_toolset", "mcp_server_name": "m"}]).tools is None


def test_non_text_parts_of_a_tool_result_are_replaced_by_a_text():
    """Claude Code's `Read` answers with an image or a PDF."""
    page = {
        "type": "document",
        "title": "Page",
        "source": {"type": "text", "data": "words"},
    }
    hit = {"type": "search_result", "title": "A", "source": "http://a", "content": [{"type": "text", "text": "found"}]}
    content = [IMAGE, {"type": "text", "text": " beside "}, {"type": "document", "source": PDF}, page, hit]
    request = decode(messages=user({"type": "tool_result", "tool_use_id": "c", "content": content}))
    assert request.messages[-1]["content"] == f"{UNREAD} beside {UNREAD}Page\nwordsA\nhttp://a\nfound"


def test_examples_of_a_tools_input_are_part_of_its_schema():
    (tool,) = decode(tools=[CALC | {"input_examples": [{"x": "1"}]}]).tools
    parameters = tool["function"]["parameters"]
    assert parameters.pop("examples") == [{"x": "1"}]
    assert parameters == CALC["input_schema"]
