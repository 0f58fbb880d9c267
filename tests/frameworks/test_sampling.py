"""Sampling parameters of the dialects on real SGLang: what was asked for is what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from arena import Arena

pytestmark = pytest.mark.engine
ASK: list[Any] = [{"role": "user", "content": "What is 12 plus 35?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}},
    }
    for name in ("calc", "search")
]


@pytest.fixture
def session(arena: Arena) -> Iterator[tuple[openai.OpenAI, Any]]:
    opened = arena.post("/sessions", {})
    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as client:
        yield client, lambda: arena.calls(opened["session_id"])
    arena.post(f"/sessions/{opened['session_id']}/end", {"status": "failed", "error": "only a test"})


def test_a_response_format_is_kept(session: Any) -> None:
    client, recorded = session
    format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    reply = client.chat.completions.create(model="default", messages=ASK, response_format=format, max_tokens=64)
    assert 10 <= json.loads(reply.choices[0].message.content)["sum"] <= 99
    assert [(call["trainable"], call["distribution_modified"]) for call in recorded()] == [(False, True)]


def test_a_schema_that_does_not_compile_is_the_callers_fault(session: Any) -> None:
    client, recorded = session
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.chat.completions.create(model="default", messages=ASK, response_format=format)
    assert recorded() == []  # it is refused before an engine sees it


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_a_forced_call_is_made(session: Any, choice: Any) -> None:
    client, recorded = session
    reply = client.chat.completions.create(
        model="default", messages=ASK, tools=TOOLS, tool_choice=choice, max_tokens=32, logit_bias={}
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name in (("calc", "search") if choice == "required" else ("search",))
    assert [(call["trainable"], call["distribution_modified"]) for call in recorded()] == [(False, True)]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_recorded_ones_and_their_likeliest(session: Any, stream: bool) -> None:
    client, recorded = session
    reply = client.chat.completions.create(
        model="default", messages=ASK, logprobs=True, top_logprobs=3, max_tokens=32, stream=stream
    )
    choices = [choice for event in reply for choice in event.choices] if stream else reply.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    (call,) = recorded()
    assert [token.logprob for token in tokens] == pytest.approx(call["logprobs"])
    for token in tokens:
        best = [other.logprob for other in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3
        assert token.logprob <= best[0] + 1e-6


def test_several_answers_are_several_calls(session: Any) -> None:
    client, recorded = session
    reply = client.chat.completions.create(
        model="default", messages=ASK, n=3, seed=1, logit_bias={"70": -1}, max_tokens=12
    )
    assert len(reply.choices) == 3
    calls = recorded()
    assert [call["output_tokens"] for call in calls] == [len(call["output_ids"]) for call in calls]
    assert reply.usage.completion_tokens == sum(call["output_tokens"] for call in calls)
    assert {call["options"]["choice"] for call in calls} == {0, 1, 2}
