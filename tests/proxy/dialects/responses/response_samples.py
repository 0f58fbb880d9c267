"""Requests of the Responses API, its answers and events as the SDK's types, and drawn answers."""

import json
import re
from typing import Any

import pytest
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.responses.responses_dialect import OpenAIResponses
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta

DIALECT = OpenAIResponses()
EVENT = TypeAdapter(ResponseStreamEvent)
ID = "0123456789abcdef" * 2
CALC = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


def decode(**fields):
    return DIALECT.decode(json.dumps({"input": "hi", **fields}).encode())


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    return caught.value


def header(**fields) -> ResponseHeader:
    return ResponseHeader(
        id=ID, created=7, model="m", prompt_tokens=3, decode=lambda ids: "".join(map(chr, ids)), **fields
    )


def answer(message, *, finish_reason="stop", text="ab") -> Answer:
    ids = [ord(c) for c in text]
    return Answer(
        interaction_id=ID,
        message={"role": "assistant", **message},
        finish_reason=finish_reason,
        stop=None,
        prompt_ids=[1, 2, 3],
        cached_tokens=2,
        tokens=Tokens(ids, [-0.5] * len(ids)),
        versions=[[0, 0, len(ids)]],
    )


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(request, the_answer) -> Any:
    """The response as the SDK's own type."""
    return Response.model_validate_json(DIALECT.encode(request, header(), [the_answer]))


def events_of(data: bytes):
    """Server-sent events as the SDK's own types; the `event:` line says the same as the data."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = re.fullmatch(r"event: (\S+)\ndata: (.*)", block).groups()
        assert json.loads(payload)["type"] == name
        found.append(EVENT.validate_json(payload))
    return found


def stream(request, deltas, the_answer):
    """What a stream of these deltas sends; the tokens come before them."""
    encoder = DIALECT.stream(request, header())
    data = encoder.start() + encoder.push(0, AnswerDelta([], the_answer.tokens))
    for delta in deltas:
        data += encoder.push(0, AnswerDelta([delta], Tokens([], [])))
    return events_of(data + encoder.finish(0, the_answer) + encoder.end([the_answer]))


def sent_back(response: Response):
    """Its output as an agent sends it back."""
    items = [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
    return DIALECT.decode(json.dumps({"input": [{"role": "user", "content": "q"}, *items]}).encode()).messages[1:]


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
ARGUMENTS = st.sampled_from(["{}", '{"x": 1}', '{"x":"ü"}', "not json", ""])
CALLS = st.lists(st.tuples(st.sampled_from(["calc", "look"]), ARGUMENTS), max_size=3)
DELTAS = st.lists(st.builds(ContentDelta, TEXT) | st.builds(ReasoningDelta, TEXT), max_size=5)


def message_from(deltas):
    """The message that deltas add up to."""
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls: dict[int, Any] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None:
                calls[delta.index] = call(delta.id, delta.name, "")
            calls[delta.index]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"content": content or (None if calls or reasoning else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def with_calls(deltas, calls):
    found = list(deltas)
    for i, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        found += [ToolCallDelta(i, f"call_{i}", name, arguments[:half]), ToolCallDelta(i, None, None, arguments[half:])]
    return found
