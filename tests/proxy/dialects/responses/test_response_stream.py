"""Streams in Responses: the order and content of their events, logprobs and failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import AnswerDelta, Tokens
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta
from agentrl.rendering.conversation import canonical

from .response_samples import (
    CALLS,
    DELTAS,
    DIALECT,
    ENCRYPTED,
    LOGPROBS,
    answer,
    decode,
    encode,
    events_of,
    header,
    message_from,
    sent_back,
    stream,
    with_calls,
)


@given(
    deltas=DELTAS,
    calls=CALLS,
    tail=DELTAS,
    length=st.booleans(),
    include=st.sampled_from([[], [ENCRYPTED], [LOGPROBS]]),
)
def test_a_stream_is_the_response_in_events(deltas, calls, tail, length, include):
    all_deltas = with_calls(deltas, calls) + tail
    message = message_from(all_deltas)
    the_answer = answer(message, finish_reason="length" if length else "stop")
    request = decode(include=include)
    events = stream(request, all_deltas, the_answer)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == ("response.incomplete" if length else "response.completed")
    final = events[-1].response
    check_items(events[2:-1], final)
    (back,) = sent_back(final)
    assert canonical(back) == canonical({"role": "assistant", **message})
    order = [(ReasoningDelta, ContentDelta, ToolCallDelta).index(type(delta)) for delta in all_deltas]
    if order == sorted(order):  # what models write
        assert final == encode(request, the_answer)


def check_items(events, final):
    """Every item is opened, filled and closed, one after the other; what its events say is what it is."""
    seen: list[str] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(seen)
                assert event.item.status == "in_progress"
                seen.append(event.item.id)
                text, part = "", None
            case "response.content_part.added":
                part = event.part.type
                assert event.part.text == ""
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event.type.split(".")[1] == part
                text += event.delta
            case "response.function_call_arguments.delta":
                text += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == text
            case "response.function_call_arguments.done":
                assert event.arguments == text
            case "response.content_part.done":
                assert (event.part.type, event.part.text) == (part, text)
            case "response.output_item.done":
                assert event.item == final.output[event.output_index]
                assert event.item.id == seen[-1]
            case other:
                pytest.fail(f"no event of an item: {other}")
        if event.type not in ("response.output_item.added", "response.output_item.done"):
            assert (event.item_id, event.output_index) == (seen[-1], len(seen) - 1)
    assert seen == [item.id for item in final.output]
    assert [event.type for event in events].count("response.output_item.done") == len(seen)


def test_a_text_delta_carries_the_logprobs_since_the_last_one():
    request = decode(include=[LOGPROBS])
    encoder = DIALECT.stream(request, header())
    data = encoder.start()
    for text, ids in [("", "<"), ("a", "a"), ("", "b"), ("bc", "c"), ("", ".")]:
        deltas = [ContentDelta(text)] if text else []
        data += encoder.push(0, AnswerDelta(deltas, Tokens([ord(c) for c in ids], [-1.0])))
    data += encoder.finish(0, answer({"content": "abc"}))
    events = events_of(data)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert ["".join(entry.token for entry in event.logprobs) for event in deltas] == ["<a", "bc"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert "".join(entry.token for entry in done.logprobs) == "<abc."


def test_a_stream_that_breaks_off_fails_visibly():
    encoder = DIALECT.stream(decode(), header())
    data = encoder.start() + encoder.push(0, AnswerDelta([ReasoningDelta("x"), ContentDelta("a")], Tokens([], [])))
    data += encoder.error(RequestError(502, "the engine died", code="engine_died"))
    *_, failed, error = events_of(data)
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert [item.type for item in failed.response.output] == ["reasoning"]  # the message was not finished
    assert (error.code, error.message, error.sequence_number) == (
        "engine_died",
        "the engine died",
        failed.sequence_number + 1,
    )
    assert error.model_extra["error"]["message"] == "the engine died"  # what makes the SDK raise


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_a_failed_response_has_one_of_openais_codes(status, code):
    encoder = DIALECT.stream(decode(), header())
    failed, _ = events_of(encoder.error(RequestError(status, "no", code="why")))
    assert failed.response.error.code == code


def test_ids_are_the_same_streamed_or_not_and_differ_within_a_response():
    deltas = with_calls([ReasoningDelta("r"), ContentDelta("c"), ReasoningDelta("s")], [("calc", "{}")] * 2)
    ids = [item.id for item in stream(decode(), deltas, answer(message_from(deltas)))[-1].response.output]
    assert len(set(ids)) == len(ids) == 5
    assert [id.split("_")[0] for id in ids] == ["rs", "msg", "rs", "fc", "fc"]
