"""Every parameter of Anthropic Messages: supported, harmless or refused by name."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_request import Named
from agentrl.rendering.validation import validate_messages, validate_tools

from .message_bodies import BLOCK, CALC, DIALECT, EPHEMERAL, HI, IMAGE, PDF, REFERENCE, USE, decode, user

CLEAR_NOTHING = {"type": "clear_thinking_20251015", "keep": "all"}


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


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
