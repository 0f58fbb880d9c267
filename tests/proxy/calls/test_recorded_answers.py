"""Recorded answers are sent again to a retry, byte for byte, and only to a retry of their own call."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from databases import KINDS

from agentrl.errors import StoreError
from agentrl.proxy.calls import recorded_answers
from agentrl.testing import Reply

from .exchange_clients import BODY, KEY, RETRY, connected, left_complete, of_calls, post, text_of, violations

GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
SEVERAL: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", BODY | {"n": 3}),
    ("/completions", {"prompt": ["ab", "cd"], "n": 2, "logprobs": 1}),
]
"""Requests with several answers."""


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *SEVERAL,
        ("/chat/completions", BODY | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        ("/chat/completions", BODY | {"tools": [GET], "tool_choice": "required"}),
    ],
)
def test_a_replayed_answer_equals_the_first_byte_for_byte(proxy, path, body):
    """Several answers, logprobs, token ids and forced calls; the contract of dialects has the other answers."""
    session = proxy.session(sampling={"temperature": 1.0})
    proxy.engine.enqueue(*[proxy.says("get()" if "tools" in body else "hello")] * 4)
    first = post(proxy, session, body, headers=KEY, path=path)
    sampled = len(proxy.engine.requests)
    again = post(proxy, session, body, headers=KEY, path=path)
    assert (again.json(), again.content) == (first.json(), first.content)
    assert len(proxy.engine.requests) == sampled


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/chat/completions", BODY), *SEVERAL])
def test_each_retry_of_a_delivered_answer_gets_it_again(proxy, path, body, stream):
    """Its client lost it behind the last byte."""
    session, body = proxy.session(sampling={"temperature": 1.0}), body | {"stream": stream}
    proxy.engine.enqueue(*[proxy.says("hello")] * 6)
    first = post(proxy, session, body, headers={}, path=path)
    sampled = len(proxy.engine.requests)
    for number in ("1", "2"):
        again = post(proxy, session, body, headers={"x-stainless-retry-count": number}, path=path)
        if stream:
            assert "hel" in again.text
        else:
            assert again.content == first.content
    assert len(proxy.engine.requests) == sampled == len(proxy.calls(session))
    assert violations(proxy) == []


@pytest.mark.parametrize("database_kind", KINDS)
def test_a_delivered_answer_comes_again_from_another_replica_to_one_of_two(proxy, second, database_kind):
    """Two retries of one number are of two requests: the second one's first try never came."""
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("hello"), proxy.says("other"))
    assert text_of(post(proxy, session, headers={})) == "hello"
    urls = [f"{replica.url}/sessions/{session['session_id']}/v1" for replica in (proxy, second)]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, proxy, session, url=url) for url in urls]
        assert sorted(text_of(answer.result()) for answer in answers) == ["hello", "other"]


@pytest.mark.parametrize("between", ["a call that goes on", "a call of its own"])
def test_a_delivered_answer_does_not_come_again_where_the_retry_may_be_of_another_call(proxy, between):
    session = proxy.session()
    proxy.engine.enqueue(proxy.says("hello"), proxy.says("between"), proxy.says("other"))
    assert text_of(post(proxy, session, headers={})) == "hello"
    if between == "a call that goes on":
        answered = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
        post(proxy, session, {"messages": [*BODY["messages"], *answered]}, headers={})
    else:
        post(proxy, session, headers={})
    sampled = len(proxy.engine.requests)
    assert text_of(post(proxy, session)) != "hello"
    assert len(proxy.engine.requests) == sampled + 1


def test_the_committed_answers_of_a_request_that_failed_are_no_turns(proxy, until):
    sessions = proxy.post("/groups").json()["sessions"]
    session = sessions[0]
    proxy.engine.enqueue(proxy.says("one"), Reply(status=500, error="broken", hold_after=0))
    told = {"Authorization": f"Bearer {session['api_key']}"}
    answer = proxy.http.post(session["base_url"] + "/chat/completions", json=BODY | {"n": 2}, headers=told)
    assert answer.status_code == 502
    for one in sessions:
        proxy.post(f"/sessions/{one['session_id']}/end")
    assert {(call["status"], call["role"]) for call in proxy.calls(session)} <= {
        ("complete", "side"),
        ("failed", "main"),
        ("aborted", "main"),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_replayed_answer_whose_client_left_is_not_marked_given(proxy, until, monkeypatch, stream):
    """The client of the retry leaves while its answer is read from the store."""
    session, body = proxy.session(), BODY | {"stream": stream}
    left_complete(proxy, session, until, body)
    load, gone, reading = recorded_answers.load, threading.Event(), threading.Event()

    async def slow(*args):
        reading.set()
        await asyncio.to_thread(gone.wait, 120)
        return await load(*args)

    with monkeypatch.context() as slowly:
        slowly.setattr(recorded_answers, "load", slow)
        with connected(session, body, **RETRY):
            assert reading.wait(120)
        gone.set()
        until(lambda: of_calls(proxy, session, "delivery") == ["free"])
    assert text_of(post(proxy, session, body)) == "hello"
    assert len(proxy.engine.requests) == 1


@pytest.mark.parametrize("mark", [RETRY, KEY])
def test_a_request_that_half_failed_is_sampled_anew(proxy, until, mark):
    session, body = proxy.session(), BODY | {"n": 2, "stream": True, "seed": 3}
    told = {"Authorization": f"Bearer {session['api_key']}"} | (mark if mark is KEY else {})
    proxy.engine.enqueue(proxy.says("one"), Reply(proxy.says("two"), hold_after=1, drop_after=2))
    with ThreadPoolExecutor(1) as pool:
        url = session["base_url"] + "/chat/completions"
        broken = pool.submit(proxy.http.post, url, json=body, headers=told)
        until(lambda: sorted(of_calls(proxy, session, "status")) == ["complete", "running"])
        proxy.engine.release()
        assert "error" in broken.result(20).text
    until(lambda: set(of_calls(proxy, session, "delivery")) == {"free"})
    post(proxy, session, body, headers=mark)
    assert sorted(of_calls(proxy, session, "status")) == ["complete", "complete", "complete", "failed"]
    assert of_calls(proxy, session, "delivery").count("free") == 2


def test_a_retry_that_cannot_read_its_answer_gives_it_back(proxy, until, monkeypatch):
    session = proxy.session()
    left_complete(proxy, session, until)

    async def broken(*args):
        raise StoreError("disk is full")

    with monkeypatch.context() as outage:
        outage.setattr(recorded_answers, "load", broken)
        told = RETRY | {"Authorization": f"Bearer {session['api_key']}"}
        assert proxy.http.post(session["base_url"] + "/chat/completions", json=BODY, headers=told).status_code == 503
        until(lambda: of_calls(proxy, session, "delivery") == ["free"])
    assert text_of(post(proxy, session)) == "hello"
