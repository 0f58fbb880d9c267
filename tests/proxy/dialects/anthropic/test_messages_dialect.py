"""Anthropic Messages: conversations in, and every parameter supported, harmless or refused by name."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import UNREAD
from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic.messages_dialect import AnthropicMessages
from agentrl.proxy.dialects.model_request import Named
from agentrl.rendering.validation import validate_messages, validate_tools

DIALECT = AnthropicMessages()
HI = {"role": "user", "content": "hi"}
CALC = {"name": "calc", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
BLOCK = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://images/1"}}
PDF = {"type": "base64", "data": "", "media_type": "application/pdf"}
REFERENCE = {"type": "tool_reference", "tool_name": "notes"}
CLEAR_NOTHING = {"type": "clear_thinking_20251015", "keep": "all"}
NOTES = {"name": "notes", "description": "Keeps notes.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
REFERENCE_IN_SYSTEM = {"type": "tool_reference", "name": "notes"}


def decode(**fields):
    return DIALECT.decode(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode())


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(*blocks):
    return [HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": list(blocks)}]


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


def test_parameters_of_a_request_are_decoded():
    request = decode(
        tools=[CALC | {"description": "Sums.", "strict": True, "type": "custom", "cache_control": EPHEMERAL}],
        tool_choice={"type": "tool", "name": "calc", "disable_parallel_tool_use": True},
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        stream=True,
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    validate_tools(request.tools)
    function = {"name": "calc", "description": "Sums.", "parameters": CALC["input_schema"]}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.tool_choice == Named("calc")
    assert not request.parallel_tool_calls
    assert request.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("m", 9, ["END"], True)
    assert request.constraint == {"json_schema": '{"type":"object"}'}
    assert decode(output_format={"type": "json_schema", "schema": {}}).constraint == {"json_schema": "{}"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, "auto"), ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none")],
)
def test_tool_choices_are_decoded(choice, expected):
    request = decode(tools=[CALC], tool_choice=choice)
    assert request.tool_choice == expected
    assert request.parallel_tool_calls


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


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({"type": "enabled", "budget_tokens": 1024, "display": "summarized"}, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, None),
        ({"type": "disabled"}, False),
        (None, None),
    ],
)
def test_thinking_is_switched_on_or_off(thinking, thinks):
    assert decode(thinking=thinking).thinks is thinks


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "between_tools"}},
        {"metadata": {"user_id": "u"}},
        {"service_tier": "auto"},
        {"speed": "fast"},
        {"thread": False},
        {"inference_geo": None},
        {"diagnostics": {"previous_message_id": None}},
        {"cache_control": {"type": "ephemeral"}},
        {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9}}},
        {"mcp_servers": []},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [CLEAR_NOTHING]}},
        {"tools": [], "stop_sequences": [], "stream": False, "temperature": None, "tool_choice": {"type": "none"}},
    ],
)
def test_harmless_parameters_change_nothing(fields):
    request, plain = decode(**fields), decode()
    names = [name for name in request.__dataclass_fields__ if name not in ("wire", "tool_choice")]
    assert {n: getattr(request, n) for n in names} == {n: getattr(plain, n) for n in names}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temprature": 1}, 400, "temprature"),
        ({"temperature": 1.5}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"container": "c"}, 400, "container"),
        ({"thread": {"type": "create"}}, 400, "thread"),
        ({"mcp_servers": [{"type": "url", "name": "m", "url": "http://m"}]}, 400, "mcp_servers"),
        (
            {"context_management": {"edits": [CLEAR_NOTHING, {"type": "clear_tool_uses_20250919"}]}},
            400,
            "context_management.edits[1]",
        ),
        (
            {"context_management": {"edits": [CLEAR_NOTHING | {"keep": {"type": "thinking_turns", "value": 1}}]}},
            400,
            "context_management.edits[0]",
        ),
        ({"compaction": {"type": "summarize"}}, 400, "compaction"),
        ({"thinking": {"type": "deep"}}, 400, "thinking"),
        ({"thinking": {"type": "enabled"}}, 400, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format"),
        ({"output_config": {"budget": {}}}, 400, "output_config.budget"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {}},
            },
            400,
            "output_format",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools[0]"),
        ({"tools": [{"name": "calc"}]}, 400, "tools[0]"),
        ({"tools": [CALC, CALC | {"input_schema": 3}]}, 400, "tools[1].input_schema"),
        ({"tools": [CALC | {"colour": "red"}]}, 400, "tools[0].colour"),
        ({"tools": [CALC | {"allowed_callers": ["code_execution_20260120"]}]}, 400, "tools[0].allowed_callers"),
        ({"tools": [CALC | {"input_examples": [3]}]}, 400, "tools[0].input_examples[0]"),
        ({"tools": [CALC | {"input_schema": {"properties": ["x"]}}]}, 400, "tools[0].input_schema.properties"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tools": [CALC], "tool_choice": {"type": "tool", "name": "clac"}}, 400, "tool_choice"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": "So"}]}, 400, "messages[1]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": user(IMAGE)}, 400, "messages[2].content[0]"),
        ({"messages": user({"type": "document"})}, 400, "messages[2].content[0]"),
        ({"messages": user(USE)}, 400, "messages[2].content[0]"),
        ({"messages": user({"type": "document", "source": PDF})}, 400, "messages[2].content[0].source"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "video"}]})},
            400,
            "messages[2].content[0].content[0]",
        ),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "c", "content": [REFERENCE]})},
            400,
            "messages[2].content[0].content[0].tool_name",
        ),
        ({"messages": user({"type": "text"})}, 400, "messages[2].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, HI]},
            400,
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [USE | {"input": []}]}, HI]},
            400,
            "messages[0].content[0].input",
        ),
        ({"system": [IMAGE]}, 400, "system[0]"),
    ],
)
def test_bad_requests_are_refused_by_name(fields, status, param):
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)
    assert param in str(error)


def test_a_misspelt_parameter_names_the_nearest():
    assert "did you mean 'temperature'?" in str(refusal(temprature=1))


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": '
        b'[{"type": "tool_use", "id": "c", "name": "f", "input": {"x": "\xff"}}]}, {"role": "user", "content": "x"}]}',
    ],
)
def test_malformed_json_is_a_400(body):
    with pytest.raises(RequestError) as caught:
        DIALECT.decode(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_count_needs_no_max_tokens_and_takes_no_sampling():
    body = {"model": "m", "messages": [HI], "system": "Be brief.", "tools": [CALC]}
    request = DIALECT.decode_count(json.dumps(body).encode())
    assert (request.messages, request.tools) == (decode(**body).messages, decode(**body).tools)
    assert json.loads(DIALECT.encode_count(17)) == {"input_tokens": 17}
    with pytest.raises(RequestError, match="'temperature' is not supported"):
        DIALECT.decode_count(json.dumps(body | {"temperature": 1}).encode())


FULL = {
    "model": "m",
    "max_tokens": 9,
    "system": [BLOCK],
    "messages": [
        HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}]},
    ],
    "tools": [CALC],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["a"],
    "top_k": 3,
}


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


broken = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=3,
)


@given(st.sampled_from([path for path in places(FULL) if path]), broken)
def test_any_request_is_decoded_or_refused(path, value):
    body = deepcopy(FULL)
    *way, last = path
    inner: Any = body
    for key in way:
        inner = inner[key]
    inner[last] = value
    try:
        request = DIALECT.decode(json.dumps(body).encode())
    except RequestError:
        return
    validate_messages(request.messages)
    validate_tools(request.tools)
