"""Clients that leave: their call waits for a retry during the grace period, then is aborted."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from agentrl.errors import StoreError
from agentrl.proxy.calls.exchanges import Exchange
from agentrl.store.calls import call_outcomes, deliveries
from agentrl.store.tables import interactions as call_rows
from agentrl.testing import Reply

from .exchange_clients import BODY, KEY, connected, leave, of_calls, post, text_of, violations

GRACE_S = 0.4


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


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
