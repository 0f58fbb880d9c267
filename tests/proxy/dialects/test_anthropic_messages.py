"""Anthropic Messages: blocks both ways, the event grammar, and every parameter supported, harmless or refused."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic_messages import AnthropicMessages
from agentrl.proxy.dialects.base import Answer, Head, Named, Piece, Tokens, message_of
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta
from agentrl.rendering.base import gather, merge
from agentrl.rendering.conversation import canonical
from agentrl.rendering.validation import validate_messages, validate_tools

DIALECT = AnthropicMessages()
EVENT = TypeAdapter(RawMessageStreamEvent)
ID = "0123456789abcdef" * 2
HI = {"role": "user", "content": "hi"}
CALC = {"name": "calc", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def decode(**fields):
    return DIALECT.decode(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode())


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


def head() -> Head:
    return Head(id=ID, created=7, model="m", prompt_tokens=3, token_text=chr)


def answer(message, *, finish_reason="stop", stop=None, text="ab") -> Answer:
    ids = [ord(c) for c in text]
    return Answer(
        interaction_id=ID, message={"role": "assistant", **message}, finish_reason=finish_reason, stop=stop,
        prompt_ids=[1, 2, 3], cached_tokens=2, tokens=Tokens(ids, [-0.5] * len(ids)), versions=[[0, 0, len(ids)]],
    )  # fmt: skip


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(the_answer, **fields) -> Message:
    return Message.model_validate_json(DIALECT.encode(decode(**fields), head(), [the_answer]))


def events_of(data: bytes):
    """Server-sent events as the SDK's own types; the `event:` line says the same as the data."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        event, body = block.split("\n")
        parsed = EVENT.validate_json(body.removeprefix("data: "))
        assert event == f"event: {parsed.type}"
        found.append(parsed)
    return found


def streamed(deltas, the_answer, **fields):
    encoder = DIALECT.stream(decode(stream=True, **fields), head())
    out = encoder.start()
    for delta in deltas:
        out += encoder.piece(0, Piece([delta], Tokens([], [])))
    return events_of(out + encoder.finish(0, the_answer) + encoder.end([the_answer]))


def blocks_of(events):
    """Content blocks put together, in a stream whose every block is started, filled and stopped in its turn."""
    blocks, open_block = [], None
    for event in events:
        match event.type:
            case "content_block_start":
                assert open_block is None
                assert event.index == len(blocks)
                open_block = event.content_block.model_dump(exclude_unset=True)
                written = ""
            case "content_block_delta":
                assert event.index == len(blocks)
                match event.delta.type:
                    case "text_delta":
                        open_block["text"] += event.delta.text
                    case "thinking_delta":
                        open_block["thinking"] += event.delta.thinking
                    case "signature_delta":
                        open_block["signature"] += event.delta.signature
                    case "input_json_delta":
                        written += event.delta.partial_json
            case "content_block_stop":
                assert event.index == len(blocks)
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(written)
                blocks.append(open_block)
                open_block = None
    assert open_block is None
    return blocks


# -- requests ------------------------------------------------------------------------------------------------------


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
            "role": "assistant", "content": "Let me see.", "reasoning_content": "well",
            "tool_calls": [call("c1", "calc", '{"x": "1"}'), call("c2", "calc", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip


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


def test_what_a_request_asks_for_is_passed_on():
    request = decode(
        tools=[CALC | {"description": "Sums.", "strict": True, "type": "custom", "cache_control": EPHEMERAL}],
        tool_choice={"type": "tool", "name": "calc", "disable_parallel_tool_use": True},
        temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"], stream=True,
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
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
def test_tool_choices(choice, expected):
    request = decode(tools=[CALC], tool_choice=choice)
    assert request.tool_choice == expected
    assert request.parallel_tool_calls


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "between_tools"}},
        {"thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "u"}},
        {"service_tier": "auto"},
        {"speed": "fast"},
        {"inference_geo": None},
        {"diagnostics": {"previous_message_id": None}},
        {"cache_control": {"type": "ephemeral"}},
        {"output_config": {"effort": "low"}},
        {"tools": [], "stop_sequences": [], "stream": False, "temperature": None, "tool_choice": {"type": "none"}},
    ],
)
def test_harmless_parameters_change_nothing(fields):
    request, plain = decode(**fields), decode()
    names = [name for name in request.__dataclass_fields__ if name not in ("wire", "tool_choice")]
    assert {n: getattr(request, n) for n in names} == {n: getattr(plain, n) for n in names}


def user(*blocks):
    return [HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": list(blocks)}]


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://images/1"}}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temprature": 1}, 422, "temprature"),
        ({"temperature": 1.5}, 422, "temperature"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"max_tokens": None}, 422, "max_tokens"),
        ({"stop_sequences": [""]}, 422, "stop_sequences"),
        ({"container": "c"}, 422, "container"),
        ({"mcp_servers": []}, 422, "mcp_servers"),
        ({"context_management": {}}, 422, "context_management"),
        ({"thinking": {"type": "deep"}}, 422, "thinking"),
        ({"thinking": {"type": "enabled"}}, 422, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, 422, "output_config.format"),
        ({"output_config": {"task_budget": {}}}, 422, "output_config.task_budget"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {}},
            },
            422,
            "output_format",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 422, "tools[0]"),
        ({"tools": [{"name": "calc"}]}, 422, "tools[0]"),
        ({"tools": [CALC | {"defer_loading": True}]}, 422, "tools[0].defer_loading"),
        ({"tools": [CALC | {"allowed_callers": ["code_execution_20260120"]}]}, 422, "tools[0].allowed_callers[0]"),
        ({"tools": [CALC | {"input_examples": [{}]}]}, 422, "tools[0].input_examples"),
        ({"tools": [CALC | {"input_schema": {"properties": ["x"]}}]}, 422, "tools[0].input_schema.properties"),
        ({"tool_choice": {"type": "any"}}, 422, "tool_choice"),
        ({"tools": [CALC], "tool_choice": {"type": "tool", "name": "clac"}}, 422, "tool_choice"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": "So"}]}, 422, "messages[1]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": user(IMAGE)}, 400, "messages[2].content[0]"),
        ({"messages": user({"type": "document"})}, 400, "messages[2].content[0]"),
        ({"messages": user(USE)}, 400, "messages[2].content[0]"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]})},
            400,
            "messages[2].content[0].content[0]",
        ),
        ({"messages": user({"type": "text"})}, 400, "messages[2].content[0]"),
        ({"messages": user({"type": "text", "text": "x", "citations": [{}]})}, 400, "messages[2].content[0].citations"),
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


# -- answers -------------------------------------------------------------------------------------------------------


def test_an_answer_is_a_message():
    message = encode(answer({"content": "hello"}))
    assert (message.id, message.model, message.role) == (f"msg_{ID}", "m", "assistant")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "hello"}]
    usage = message.usage.model_dump(exclude_none=True)
    assert usage == {
        "input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("finish_reason", "stop", "stop_reason", "stop_sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("tool_calls", "END", "tool_use", None),
    ],
)
def test_stop_reasons(finish_reason, stop, stop_reason, stop_sequence):
    the_answer = answer({"content": "x"}, finish_reason=finish_reason, stop=stop)
    message = encode(the_answer)
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)
    *_, delta, last = streamed([ContentDelta("x")], the_answer)
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (stop_reason, stop_sequence)
    assert delta.usage.model_dump(exclude_none=True) == message.usage.model_dump(exclude_none=True)
    assert last.type == "message_stop"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" ", {}),
        ('{"x": [1, 2.50]}', {"x": [1, 2.5]}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ("[1]", {"arguments": "[1]"}),
        ('{"x": ', {"arguments": '{"x": '}),
        ('{"x": NaN}', {"arguments": '{"x": NaN}'}),
        ('{"x": "\\ud800"}', {"arguments": '{"x": "\\ud800"}'}),
    ],
)
def test_a_tools_input_is_an_object_whatever_the_arguments(arguments, expected):
    the_answer = answer({"content": None, "tool_calls": [call("c", "f", arguments)]}, finish_reason="tool_calls")
    (block,) = encode(the_answer).content
    assert block.input == expected
    assert blocks_of(streamed([ToolCallDelta(0, "c", "f", arguments)], the_answer))[0]["input"] == expected


def test_thinking_that_is_not_to_be_shown_is_an_empty_block():
    the_answer = answer({"content": "x", "reasoning_content": "secret"})
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    expected = [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "x"}]
    blocks = [block.model_dump(exclude_unset=True) for block in encode(the_answer, **fields).content]
    assert blocks == expected
    assert blocks_of(streamed([ReasoningDelta("secret"), ContentDelta("x")], the_answer, **fields)) == expected


def test_a_stream_has_anthropics_grammar():
    deltas = [
        ReasoningDelta("hm"),
        ReasoningDelta("m"),
        ContentDelta("so"),
        ToolCallDelta(0, "c1", "calc", '{"x"'),
        ToolCallDelta(0, None, None, ": 1}"),
        ToolCallDelta(1, "c2", "calc", "{}"),
    ]
    message = {
        "content": "so", "reasoning_content": "hmm",
        "tool_calls": [call("c1", "calc", '{"x": 1}'), call("c2", "calc", "{}")],
    }  # fmt: skip
    the_answer = answer(message, finish_reason="tool_calls")
    events = streamed(deltas, the_answer)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [event.type for event in events] == [
        "message_start",
        *(start, delta, delta, delta, stop),  # thinking, its signature last
        *(start, delta, stop),
        *(start, delta, stop),
        *(start, delta, stop),
        "message_delta",
        "message_stop",
    ]
    first = events[0].message
    assert (first.id, first.content, first.stop_reason, first.usage.input_tokens) == (f"msg_{ID}", [], None, 3)
    assert blocks_of(events) == [block.model_dump(exclude_unset=True) for block in encode(the_answer).content]


def test_a_tool_call_is_closed_by_what_follows_its_last_piece():
    encoder = DIALECT.stream(decode(stream=True), head())
    opened = events_of(encoder.piece(0, Piece([ToolCallDelta(0, "c", "f", "{}")], Tokens([], []))))
    assert [event.type for event in opened] == ["content_block_start"]
    the_answer = answer({"content": None, "tool_calls": [call("c", "f", "{}")]}, finish_reason="tool_calls")
    closed = events_of(encoder.finish(0, the_answer))
    assert [event.type for event in closed] == ["content_block_delta", "content_block_stop", "message_delta"]


def test_an_empty_answer_is_an_empty_text():
    empty = answer({"content": ""}, text="")
    assert [block.model_dump(exclude_unset=True) for block in encode(empty).content] == [{"type": "text", "text": ""}]
    assert blocks_of(streamed([], empty)) == [{"type": "text", "text": ""}]


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2), max_leaves=4
)
calls = st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(text, values, max_size=3))
parts = st.one_of(st.builds(ContentDelta, text), st.builds(ReasoningDelta, text), calls)


@st.composite
def outputs(draw):
    """Deltas as a parser sends them, calls in one piece or two, texts between them."""
    deltas = []
    count = 0
    for part in draw(st.lists(parts, max_size=6)):
        if not isinstance(part, tuple):
            deltas.append(part)
            continue
        name, value = part
        arguments = json.dumps(value)
        cut = draw(st.integers(0, len(arguments)))
        deltas.append(ToolCallDelta(count, f"call_{count}", name, arguments[:cut]))
        deltas.append(ToolCallDelta(count, None, None, arguments[cut:]))
        count += 1
    return merge(deltas)


@given(outputs())
def test_what_was_delivered_comes_back_as_the_same_conversation(deltas):
    message = message_of(gather(deltas, []))
    the_answer = answer(message, finish_reason="tool_calls" if message.get("tool_calls") else "stop")
    whole = [block.model_dump(mode="json", exclude_unset=True) for block in encode(the_answer).content]
    for blocks in (whole, blocks_of(streamed(deltas, the_answer))):
        _, back, _ = decode(messages=[HI, {"role": "assistant", "content": blocks}, HI]).messages
        validate_messages([back])
        assert canonical(back) == canonical(message)
        assert back.get("reasoning_content") == message.get("reasoning_content")


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_shape(status, kind):
    body = json.loads(DIALECT.encode_error(RequestError(status, "no", code="bad", param="tools[0]")))
    details = {"error_code": "bad", "param": "tools[0]"}
    assert body == {"type": "error", "error": {"type": kind, "message": "no", "details": details}}


def test_a_stream_that_breaks_ends_with_an_error_event():
    encoder = DIALECT.stream(decode(stream=True), head())
    out = encoder.start() + encoder.error(RequestError(502, "gone", code="engine_died"))
    event, data = out.decode().split("\n\n")[1].split("\n")
    assert event == "event: error"
    assert ErrorResponse.model_validate_json(data.removeprefix("data: ")).error.message == "gone"
