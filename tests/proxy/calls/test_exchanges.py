"""A retry of a call under way gets the call's answer: nothing is sampled twice, on any replica."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from databases import KINDS

from agentrl.engine.server_process import free_port
from agentrl.proxy.calls import answer_finder
from agentrl.proxy.calls.answer_finder import AnswerFinder
from agentrl.testing import Reply

from .exchange_clients import BODY, RETRY, connected, leave, of_calls, post, release, text_of, violations


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [0, 2])
def test_a_retry_joins_the_answer_that_is_being_sampled(proxy, until, stream, sampled):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=sampled))
    body = BODY | {"stream": stream}
    leave(proxy, session, until, body)
    threading.Timer(0.3, proxy.engine.release).start()
    assert text_of(post(proxy, session, body)) == "hello"
    assert len(proxy.engine.requests) == 1
    until(lambda: [(c["status"], c["delivery"]) for c in proxy.calls(session)] == [("complete", "given")])


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_what_was_recorded_meanwhile_from_the_first_byte(proxy, until, stream):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=2))
    body = BODY | {"stream": stream}
    leave(proxy, session, until, body)
    proxy.engine.release()
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["complete"])
    assert text_of(post(proxy, session, body)) == "hello"
    assert len(proxy.engine.requests) == 1
    until(lambda: [call["delivery"] for call in proxy.calls(session)] == ["given"])
    other = post(proxy, session, body)  # this number has its answer: it is a retry of a call that never came
    assert text_of(other) != "hello"
    assert violations(proxy) == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_own_time_out_and_retries_sample_once(proxy, until, stream):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    sent = []

    def note(request):
        sent.append(request)
        if len(sent) == 3:
            proxy.engine.release()

    with httpx.Client(event_hooks={"request": [note]}) as http:
        client = proxy.sdk(session, timeout=0.5, http_client=http).with_options(max_retries=12)
        answer = client.chat.completions.create(model="default", stream=stream, **BODY)
        text = (
            "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
        )
    assert text == "hello"
    assert len(sent) >= 3
    assert len(proxy.engine.requests) == 1


def test_parallel_identical_calls_stay_different_calls(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(*(Reply(proxy.says(letter), hold_after=0) for letter in "abcdefgh"))
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, proxy, session, headers={}) for _ in range(8)]
        until(lambda: proxy.engine.holding == 8)
        release(proxy, 8)
        assert sorted(text_of(answer.result()) for answer in answers) == list("abcdefgh")
    assert len({call["id"] for call in proxy.calls(session)}) == 8


def test_each_of_eight_lost_answers_is_claimed_once(proxy, until):
    session = proxy.session()
    for letter in "abcdefgh":
        proxy.engine.enqueue(Reply(proxy.says(letter), hold_after=0))
        leave(proxy, session, until)
    release(proxy, 8)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: text_of(post(proxy, session)), range(8)))
    assert sorted(answers) == list("abcdefgh")
    assert len(proxy.engine.requests) == 8


def test_a_retry_waits_until_the_disconnection_is_noticed(proxy, until, monkeypatch):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    with ThreadPoolExecutor(1) as pool:
        with connected(session, BODY):
            until(lambda: proxy.engine.holding == 1)
            retried = pool.submit(post, proxy, session)
            with pytest.raises(TimeoutError):
                retried.result(0.5)
        proxy.engine.release()
        assert text_of(retried.result()) == "hello"
    assert len(proxy.engine.requests) == 1


def test_a_retry_of_a_request_that_never_arrived_is_sampled(proxy, until, monkeypatch):
    """Another client goes on waiting for its own answer."""
    monkeypatch.setattr(answer_finder, "HELD_S", 0.2)
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0), proxy.says("other"))
    with connected(session, BODY) as lines:
        until(lambda: proxy.engine.holding == 1)
        assert text_of(post(proxy, session)) == "other"
        proxy.engine.release()
        assert b"hello" in lines.read()


@pytest.mark.parametrize("database_kind", KINDS)
@pytest.mark.parametrize("complete", [False, True])
def test_a_retry_is_answered_by_another_replica(proxy, second, until, complete):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    leave(proxy, session, until)
    if complete:
        proxy.engine.release()
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["complete"])
    else:
        threading.Timer(0.5, proxy.engine.release).start()
    url = f"{second.url}/sessions/{session['session_id']}/v1"
    assert text_of(post(proxy, session, url=url)) == "hello"
    assert len(proxy.engine.requests) == 1
    until(lambda: [call["delivery"] for call in proxy.calls(session)] == ["given"])
    assert violations(proxy) == []


@pytest.mark.parametrize("database_kind", KINDS)
def test_a_retry_is_answered_after_a_restart(own_proxy, serve, store_url, until):
    """The proxy died after the commit, and nobody knows whether the answer got out."""
    session = own_proxy.session()
    own_proxy.engine.enqueue(Reply(own_proxy.says("hello"), hold_after=1))
    port = free_port()
    url = f"http://127.0.0.1:{port}/sessions/{session['session_id']}/v1"
    with serve(store_url, [own_proxy.engine.url], port, replica="mortal"):
        with connected(session, BODY, url=url):
            until(lambda: own_proxy.engine.holding == 1)
        own_proxy.engine.release()
        until(lambda: [call["status"] for call in own_proxy.calls(session)] == ["complete"])
    with own_proxy.database.write() as conn:
        conn.exec_driver_sql("UPDATE interactions SET delivery = 'open', holder = 'mortal'")
    with serve(store_url, [own_proxy.engine.url], port, replica="mortal"):
        until(lambda: [call["delivery"] for call in own_proxy.calls(session)] == ["unsure"])
        assert text_of(post(own_proxy, session, url=url)) == "hello"
    assert len(own_proxy.engine.requests) == 1


def test_a_retry_in_a_session_that_has_ended_is_refused(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    leave(proxy, session, until)
    proxy.engine.release()
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["complete"])
    proxy.post(f"/sessions/{session['session_id']}/end")
    told = RETRY | {"Authorization": f"Bearer {session['api_key']}"}
    assert proxy.http.post(session["base_url"] + "/chat/completions", json=BODY, headers=told).status_code == 409


class TestOneAtATime:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"max_concurrent_calls_per_session": 1}}

    def test_a_retry_of_a_refused_call_gets_no_other_calls_answer(self, proxy, second, until):
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0), proxy.says("other"))
        told = {"Authorization": f"Bearer {session['api_key']}"}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, proxy, session, headers={})
            until(lambda: proxy.engine.holding == 1)
            refused = proxy.http.post(session["base_url"] + "/chat/completions", json=BODY, headers=told)
            assert refused.status_code == 429
            proxy.engine.release()
            assert text_of(first.result()) == "hello"
        until(lambda: of_calls(proxy, session, "delivery") == ["given"])
        url = f"{second.url}/sessions/{session['session_id']}/v1"
        assert text_of(post(proxy, session, url=url)) == "other"


def test_requests_with_one_idempotency_key_at_once_sample_once(proxy, second, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    urls = [f"{replica.url}/sessions/{session['session_id']}/v1" for replica in (proxy, second)] * 3
    with ThreadPoolExecutor(6) as pool:
        key = {"Idempotency-Key": "k"}
        answers = [pool.submit(post, proxy, session, headers=key, url=url) for url in urls]
        until(lambda: proxy.engine.holding == 1)
        threading.Timer(0.3, proxy.engine.release).start()
        assert {text_of(answer.result()) for answer in answers} == {"hello"}
    assert len(proxy.engine.requests) == 1


def test_a_retry_that_leaves_gives_back_what_it_waits_for(proxy, second, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    leave(proxy, session, until)
    with connected(session, BODY, url=f"{second.url}/sessions/{session['session_id']}/v1", **RETRY):
        until(lambda: of_calls(proxy, session, "delivery") == ["open"])
    until(lambda: of_calls(proxy, session, "delivery") == ["free"])
    proxy.engine.release()
    assert text_of(post(proxy, session)) == "hello"
    assert len(proxy.engine.requests) == 1


def test_a_retry_whose_client_left_is_not_sampled(proxy, until, monkeypatch):
    monkeypatch.setattr(answer_finder, "HELD_S", 0.5)
    claims, claim = [], AnswerFinder._claim

    async def noted(*args):
        try:
            return await claim(*args)
        finally:
            claims.append(args)

    monkeypatch.setattr(AnswerFinder, "_claim", noted)
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    with connected(session, BODY) as lines:
        until(lambda: proxy.engine.holding == 1)
        with connected(session, BODY, **RETRY):
            until(lambda: proxy.metrics_text().count("agentrl_calls_in_flight 2"))
        until(lambda: claims)
        proxy.engine.release()
        assert b"hello" in lines.read()
    assert len(proxy.calls(session)) == 1
