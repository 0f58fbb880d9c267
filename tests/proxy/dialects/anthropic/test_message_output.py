"""Messages of the assistant, whole and streamed: the SDK's own types, Anthropic's event grammar, the way back."""

import json
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic.messages_dialect import AnthropicMessages
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens, message_of
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta
from agentrl.rendering.conversation import canonical
from agentrl.rendering.renderer import gather, merge
from agentrl.rendering.validation import validate_messages

DIALECT = AnthropicMessages()
EVENT = TypeAdapter(RawMessageStreamEvent)
ID = "0123456789abcdef" * 2
HI = {"role": "user", "content": "hi"}


def decode(**fields):
    return DIALECT.decode(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode())


def header() -> ResponseHeader:
    return ResponseHeader(id=ID, created=7, model="m", prompt_tokens=3, decode=lambda ids: "".join(map(chr, ids)))


def answer(message, *, finish_reason="stop", stop=None, text="ab") -> Answer:
    ids = [ord(c) for c in text]
    return Answer(
        interaction_id=ID,
        message={"role": "assistant", **message},
        finish_reason=finish_reason,
        stop=stop,
        prompt_ids=[1, 2, 3],
        cached_tokens=2,
        tokens=Tokens(ids, [-0.5] * len(ids)),
        versions=[[0, 0, len(ids)]],
    )


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(the_answer, **fields) -> Message:
    return Message.model_validate_json(DIALECT.encode(decode(**fields), header(), [the_answer]))


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
    encoder = DIALECT.stream(decode(stream=True, **fields), header())
    out = encoder.start()
    for delta in deltas:
        out += encoder.push(0, AnswerDelta([delta], Tokens([], [])))
    return events_of(out + encoder.finish(0, the_answer) + encoder.end([the_answer]))


def blocks_of(events):
    """Content blocks put together, in a stream whose every block is started, filled and stopped in its turn."""
    blocks: list[dict] = []
    open_block: Any = None
    written = ""
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


def test_an_answer_is_a_message():
    message = encode(answer({"content": "hello"}))
    assert (message.id, message.model, message.role) == (f"msg_{ID}", "m", "assistant")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "hello"}]
    usage = message.usage.model_dump(exclude_none=True)
    assert usage == {
        "input_tokens": 1,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }


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
def test_a_finish_reason_has_its_stop_reason(finish_reason, stop, stop_reason, stop_sequence):
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
        "content": "so",
        "reasoning_content": "hmm",
        "tool_calls": [call("c1", "calc", '{"x": 1}'), call("c2", "calc", "{}")],
    }
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
    encoder = DIALECT.stream(decode(stream=True), header())
    opened = events_of(encoder.push(0, AnswerDelta([ToolCallDelta(0, "c", "f", "{}")], Tokens([], []))))
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
def test_a_delivered_answer_sent_back_is_the_same_conversation(deltas):
    message = message_of(gather(deltas, []))
    the_answer = answer(message, finish_reason="tool_calls" if message.get("tool_calls") else "stop")
    whole = [block.model_dump(mode="json", exclude_unset=True) for block in encode(the_answer).content]
    for blocks in (whole, blocks_of(streamed(deltas, the_answer))):
        _, back, _ = decode(messages=[HI, {"role": "assistant", "content": blocks}, HI]).messages
        validate_messages([back])
        assert canonical(back) == canonical(message)
        assert back.get("reasoning_content") == message.get("reasoning_content")


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (409, "conflict_error", anthropic.ConflictError),
        (413, "request_too_large", anthropic.ContentTooLargeError),
        (422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (502, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.ServiceUnavailableError),
        (504, "timeout_error", anthropic.GatewayTimeoutError),
    ],
)
def test_errors_have_anthropics_shape_and_the_sdks_classes(status, kind, raised):
    body = DIALECT.encode_error(RequestError(status, "no", code="bad", param="tools[0]"))
    transport = httpx2.MockTransport(lambda request: httpx2.Response(status, content=body))
    with (
        anthropic.Anthropic(api_key="k", max_retries=0, http_client=httpx2.Client(transport=transport)) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    error: Any = caught.value
    assert type(error) is raised
    assert (error.type, error.api_message, error.error_code) == (kind, "no", "bad")
    assert error.body["error"]["details"]["param"] == "tools[0]"


def test_a_stream_that_breaks_ends_with_an_error_event():
    encoder = DIALECT.stream(decode(stream=True), header())
    out = encoder.start() + encoder.error(RequestError(502, "gone", code="engine_died"))
    event, data = out.decode().split("\n\n")[1].split("\n")
    assert event == "event: error"
    assert ErrorResponse.model_validate_json(data.removeprefix("data: ")).error.message == "gone"
