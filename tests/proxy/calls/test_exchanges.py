"""Never sampled twice: a client that leaves comes back for its answer, here, elsewhere, and after a restart."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.engine.server_process import free_port
from agentrl.errors import StoreError
from agentrl.proxy.calls import answer_finder, recorded_answers
from agentrl.proxy.calls.answer_finder import AnswerFinder
from agentrl.proxy.calls.exchanges import Exchange
from agentrl.store.audit import run_audit
from agentrl.store.calls import call_outcomes, deliveries
from agentrl.store.tables import interactions as call_rows
from agentrl.testing import Reply

BODY = {"messages": [{"role": "user", "content": "ab"}]}
RETRY = {"x-stainless-retry-count": "1"}
KEY = {"Idempotency-Key": "k"}
GRACE_S = 0.4
GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


@contextmanager
def connected(session, body, path="/chat/completions", url=None, **headers):
    """A client that has sent its request; it leaves at the end of the block, or reads by the file it is given."""
    url = httpx.URL(url or session["base_url"])
    raw = orjson.dumps(body)
    told = {
        "host": f"{url.host}:{url.port}",
        "x-api-key": session["api_key"],
        "content-type": "application/json",
        "content-length": str(len(raw)),
        "connection": "close",
    } | headers
    head = f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in told.items())
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(head.encode() + b"\r\n" + raw)
        with client.makefile("rb") as lines:
            yield lines


def leave(proxy, session, until, body=BODY, **headers):
    """A client leaves while the engine samples its answer."""
    before = proxy.engine.holding
    with connected(session, body, **headers):
        until(lambda: proxy.engine.holding == before + 1)
    until(lambda: [call["delivery"] for call in proxy.calls(session)][-1] == "free")


def post(proxy, session, body=BODY, *, headers=RETRY, path="/chat/completions", url=None):
    told = {"Authorization": f"Bearer {session['api_key']}"} | headers
    answer = proxy.http.post((url or session["base_url"]) + path, json=body, headers=told)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer):
    """The content of an answer, whole or streamed."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def release(proxy, count):
    for _ in range(count):
        proxy.engine.release()


def of_calls(proxy, session, field):
    return [call[field] for call in proxy.calls(session)]


def left_complete(proxy, session, until, body=BODY):
    """An answer that was recorded after its client had left."""
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    leave(proxy, session, until, body)
    proxy.engine.release()
    until(lambda: of_calls(proxy, session, "status") == ["complete"])


def violations(proxy):
    with proxy.database.read() as conn:
        return list(run_audit.scan(conn, proxy.run_id))


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


class Periods:
    """Counts grace periods that are over. The end of the first is noticed once `noticed` is set."""

    def __init__(self):
        self.count, self.noticed = 0, threading.Event()


@pytest.fixture
def periods(monkeypatch):
    found, asked = Periods(), Exchange._stop_unless_wanted

    async def counted(exchange):
        await asyncio.to_thread(found.noticed.wait, 120)
        found.count += 1
        await asked(exchange)

    monkeypatch.setattr(Exchange, "_stop_unless_wanted", counted)
    yield found
    found.noticed.set()


def holders(proxy):
    """The replicas at which clients wait."""
    with proxy.database.read() as conn:
        return list(conn.execute(select(call_rows.c.holder)).scalars())


class TestGrace:
    """Replicas, and the grace periods of all calls."""

    @pytest.fixture
    def proxy(self, own_proxy):
        return own_proxy

    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"retry_grace_s": GRACE_S}}

    def test_a_client_that_is_gone_for_good_frees_the_engine(self, proxy, until):
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1), proxy.says("again"))
        leave(proxy, session, until)
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["aborted"])
        until(lambda: not proxy.engine.running)
        assert text_of(post(proxy, session)) == "again"

    def outlast(self, proxy, until, periods):
        """The engine goes on when a request that waits at the second replica has outlasted a grace period."""
        until(lambda: holders(proxy) == ["second-replica"])
        periods.noticed.set()
        until(lambda: periods.count >= 2)
        proxy.engine.release()

    def test_a_call_is_kept_while_a_retry_waits_at_another_replica(self, proxy, second, until, periods):
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
        leave(proxy, session, until)
        url = f"{second.url}/sessions/{session['session_id']}/v1"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, proxy, session, url=url)
            self.outlast(proxy, until, periods)
            assert text_of(answer.result()) == "hello"
        assert len(proxy.engine.requests) == 1

    def test_a_call_is_kept_while_another_request_with_its_key_waits(self, proxy, second, until, periods):
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
        url = f"{second.url}/sessions/{session['session_id']}/v1"
        with ThreadPoolExecutor(1) as pool:
            with connected(session, BODY, **KEY):
                until(lambda: proxy.engine.holding == 1)
                other = pool.submit(post, proxy, session, headers=KEY, url=url)
                until(lambda: "agentrl_calls_in_flight 1" in replace(proxy, url=second.url).metrics_text())
            self.outlast(proxy, until, periods)
            assert text_of(other.result()) == "hello"
        assert len(proxy.engine.requests) == 1


class TestWithoutGrace:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"retry_grace_s": 0}}

    @pytest.mark.parametrize("sampled", [0, 1])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_away_aborts_its_call(self, proxy, until, stream, sampled):
        """What was sampled is neither delivered nor trained, and the engine is told to stop."""
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=sampled), proxy.says("again"))
        with connected(session, BODY | {"stream": stream}):
            until(lambda: proxy.engine.holding)
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["aborted"])
        until(lambda: not proxy.engine.running)
        assert text_of(post(proxy, session)) == "again"

    def test_a_client_that_leaves_during_the_commit_frees_the_answer(self, proxy, until, monkeypatch):
        session, finish = proxy.session(), call_outcomes.finish
        commits, gone = threading.Event(), threading.Event()

        def slow(*args):
            commits.set()
            gone.wait(120)
            return finish(*args)

        monkeypatch.setattr(call_outcomes, "finish", slow)
        proxy.engine.enqueue(proxy.says("hello"))
        with connected(session, BODY):
            assert commits.wait(120)
        until(lambda: "agentrl_calls_in_flight 0" in proxy.metrics_text())
        gone.set()
        until(lambda: of_calls(proxy, session, "status") == ["complete"])
        until(lambda: of_calls(proxy, session, "delivery") == ["free"])


def test_the_end_of_a_session_aborts_calls_without_a_client(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    leave(proxy, session, until)
    proxy.post(f"/sessions/{session['session_id']}/end")
    until(lambda: not proxy.engine.running)
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["aborted"])


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_undelivered_answer_is_no_turn_of_the_agent(proxy, until, goes_on):
    """Unless a later call goes on from it: then its text got through, if not its end."""
    sessions = proxy.post("/groups").json()["sessions"]
    session = sessions[0]
    proxy.engine.enqueue(Reply(proxy.says("lost"), hold_after=1))
    leave(proxy, session, until)
    proxy.engine.release()
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["complete"])
    messages = [*BODY["messages"], {"role": "assistant", "content": "lost"}, {"role": "user", "content": "more"}]
    post(proxy, session, {"messages": messages} if goes_on else BODY, headers={})
    for one in sessions:
        proxy.post(f"/sessions/{one['session_id']}/reward", {"value": 1.0})
        proxy.post(f"/sessions/{one['session_id']}/end")
    assert [call["role"] for call in proxy.calls(session)] == (["main", "main"] if goes_on else ["side", "main"])
    assert violations(proxy) == []


def test_a_retry_in_a_session_that_has_ended_is_refused(proxy, until):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    leave(proxy, session, until)
    proxy.engine.release()
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["complete"])
    proxy.post(f"/sessions/{session['session_id']}/end")
    told = RETRY | {"Authorization": f"Bearer {session['api_key']}"}
    assert proxy.http.post(session["base_url"] + "/chat/completions", json=BODY, headers=told).status_code == 409


SEVERAL: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", BODY | {"n": 3}),
    ("/completions", {"prompt": ["ab", "cd"], "n": 2, "logprobs": 1}),
]
"""Requests with several answers."""


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


def test_a_disconnection_is_recorded_after_a_storage_error(proxy, until, monkeypatch):
    session, left = proxy.session(), deliveries.release
    refused: list[Any] = []

    def refuses_once(*args):
        if not refused:
            refused.append(args)
            raise StoreError("disk is full")
        left(*args)

    monkeypatch.setattr(deliveries, "release", refuses_once)
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    leave(proxy, session, until)
    assert refused
    proxy.engine.release()
    assert text_of(post(proxy, session)) == "hello"


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


@pytest.mark.parametrize("ends", ["elsewhere", "with its parent", "before its client leaves"])
def test_the_end_of_a_session_stops_it_however_it_came(proxy, second, until, ends):
    session = parent = proxy.session()
    if ends == "with its parent":
        session = proxy.post("/sessions", {"parent_session_id": parent["session_id"]}).json()
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    ending = second if ends == "elsewhere" else proxy
    with connected(session, BODY):
        until(lambda: proxy.engine.holding == 1)
        if ends == "before its client leaves":
            ending.post(f"/sessions/{parent['session_id']}/end")
    if ends != "before its client leaves":
        ending.post(f"/sessions/{parent['session_id']}/end")
    until(lambda: of_calls(proxy, session, "status") == ["aborted"])


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(proxy, until, caplog):
    session = proxy.session()
    url = httpx.URL(session["base_url"])
    head = f"POST {url.path.rstrip('/')}/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {session['api_key']}\r\n"
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(head.encode() + b"content-length: 100\r\n\r\nabc")
        until(lambda: "agentrl_calls_in_flight 1" in proxy.metrics_text())
    until(lambda: "agentrl_calls_in_flight 0" in proxy.metrics_text())
    assert "Exception in ASGI" not in caplog.text
