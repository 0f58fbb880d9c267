"""Answers of other models: streams end after the commit; an error keeps its status, or becomes a 502 or 504."""

from typing import Any

import openai
import pytest

from .judge_server import HELLO, STREAM, ask, bearer, chunk, event, stream, upstream_calls, violations, whole


def test_a_stream_comes_as_it_is_and_ends_after_the_commit(proxy, judge):
    judge.answer = stream(*STREAM, wait_before=2)
    session = proxy.session()
    events = iter(ask(proxy, session, stream=True))
    assert next(events).choices[0].delta.content == "go"
    assert next(events).choices[0].delta.content == "od"
    assert [call["status"] for call in proxy.calls(session)] == ["running"]
    judge.gate.set()
    assert next(events).choices[0].finish_reason == "stop"
    (call,) = proxy.calls(session)
    assert (call["status"], call["finish_reason"]) == ("complete", "stop")
    assert [e if e == "[DONE]" else e["choices"][0]["delta"].get("content") for e in call["answer"]["events"]] == [
        "go",
        "od",
        None,
        "[DONE]",
    ]
    assert list(events) == []


TOOL_CALLS = [
    (
        "/chat/completions",
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "a", "arguments": ""}}]}}]},
        STREAM[2:],
    ),
    (
        "/messages",
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "a", "input": {}}},
        [event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}), event({"type": "message_stop"})],
    ),
    (
        "/responses",
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "a", "arguments": ""}},
        [event({"type": "response.completed", "response": {"status": "completed"}})],
    ),
]


@pytest.mark.parametrize(("path", "data", "end"), TOOL_CALLS, ids=["chat", "messages", "responses"])
def test_a_tool_call_is_relayed_after_the_commit(proxy, judge, path, data, end):
    """However its stream goes on: an agent may act on a call whose arguments are whole."""
    judge.answer = stream(chunk("go"), event(data), chunk("on"), *end, wait_before=3)
    session = proxy.session()
    body = {"model": "judge", "messages": HELLO, "stream": True}
    with proxy.http.stream("POST", session["base_url"] + path, json=body, headers=bearer(session)) as got:
        pieces = got.iter_raw()
        assert next(pieces) == chunk("go")
        judge.gate.set()
        rest = next(pieces)
        assert rest.startswith(event(data))
        assert [call["status"] for call in proxy.calls(session)] == ["complete"]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_streamed_bytes_are_relayed_however_they_are_cut(proxy, judge, size):
    sent = b"".join(STREAM).replace(b"\n", b"\r\n") + b": bye\n\n"
    judge.answer = stream(*(sent[i : i + size] for i in range(0, len(sent), size)))
    session = proxy.session()
    body = {"model": "judge", "messages": HELLO, "stream": True}
    got = proxy.http.post(session["base_url"] + "/chat/completions", json=body, headers=bearer(session))
    assert got.content == sent.removesuffix(b": bye\n\n")
    assert len(upstream_calls(proxy, session)[0]["answer"]["events"]) == 4


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {}),
        pytest.param(404, {}, marks=pytest.mark.long),
        (429, {"Retry-After": "7"}),
        pytest.param(500, {}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_keeps_its_status_and_body(proxy, judge, status, headers, streamed):
    judge.answer = whole({"error": {"message": "no", "code": "odd"}}, status, headers)
    session = proxy.session()
    with pytest.raises(openai.APIStatusError) as caught:
        ask(proxy, session, stream=streamed)
    assert caught.value.status_code == status
    assert caught.value.body == {"message": "no", "code": "odd"}
    assert caught.value.response.headers.get("retry-after") == headers.get("Retry-After")
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"
    assert str(status) in call["error"]
    assert violations(proxy) == []


def test_an_upstream_that_is_down_is_a_502_by_name(proxy):
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="nobody failed") as caught:
        ask(proxy, session, "nobody")
    assert caught.value.status_code == 502
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_an_upstream_that_is_slow_is_a_504(proxy, judge):
    async def never(judge, request):
        await judge.opened()

    judge.answer = never
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="did not answer in") as caught:
        ask(proxy, session, "hasty")
    assert caught.value.status_code == 504
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


@pytest.mark.parametrize(
    ("sent", "cut"),
    [(STREAM[:2], True), (STREAM[:2], False), ((*STREAM[:2], event({"error": {"message": "overloaded"}})), False)],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_is_recorded_as_failed(proxy, judge, sent, cut):
    judge.answer = stream(*sent, cut=cut)
    session = proxy.session()
    with pytest.raises(openai.APIError):
        list(ask(proxy, session, stream=True))
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]
    assert violations(proxy) == []


def test_a_stream_that_breaks_off_before_its_first_event_is_a_502(proxy, judge):
    judge.answer = stream(cut=True)
    with pytest.raises(openai.InternalServerError):
        ask(proxy, proxy.session(), stream=True)


@pytest.mark.parametrize("body", ["no object", [1], None])
def test_an_answer_that_is_no_object_is_a_502(proxy, judge, body):
    judge.answer = whole(body)
    session = proxy.session()
    with pytest.raises(openai.InternalServerError, match="did not answer with a JSON object"):
        ask(proxy, session)
    assert [call["status"] for call in proxy.calls(session)] == ["failed"]


def test_redirects_are_not_followed(proxy, judge):
    judge.answer = whole({}, 307, {"Location": "/elsewhere"})
    with pytest.raises(openai.InternalServerError, match="redirects"):
        ask(proxy, proxy.session())
    assert len(judge.got) == 1


def test_streams_of_the_other_dialects_are_held_back_from_their_ends(proxy, judge):
    session = proxy.session()
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"stop_reason": None}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "good"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    judge.answer = stream(*(event(e, e["type"]) for e in events))
    url = session["base_url"].removesuffix("/v1")
    body = {"model": "judge", "messages": HELLO, "stream": True}
    got = proxy.http.post(f"{url}/v1/messages", json=body, headers=bearer(session))
    assert got.content == b"".join(event(e, e["type"]) for e in events)
    events = [
        {"type": "response.created", "response": {"status": "in_progress"}},
        {"type": "response.completed", "response": {"status": "completed"}},
    ]
    judge.answer = stream(*(event(e, e["type"]) for e in events))
    proxy.http.post(f"{url}/v1/responses", json=body, headers=bearer(session))
    assert [call["finish_reason"] for call in proxy.calls(session)] == ["max_tokens", "completed"]
