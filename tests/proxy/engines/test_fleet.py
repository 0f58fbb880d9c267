"""Engines join and leave while agents talk: each serves only the run's version, and no agent sees an error."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from agentrl.engine.engine_keys import derived_key, key_digest
from agentrl.engine.membership import Membership, Place
from agentrl.engine.server_process import free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import UserError
from agentrl.store.tables import engines, interactions
from agentrl.testing import FakeEngine, FakeVLLM, Reply

ROUNDS = int(os.environ.get("AGENTRL_FLEET_ROUNDS", "5"))
"""Rounds of the test under load; 50 take some minutes."""
ADMIN = {"Authorization": "Bearer admin-key"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def empty(proxy, serve, store_url):
    """A proxy that was started without engines."""
    port = free_port()
    with serve(store_url, [], port, replica="empty-replica"):
        yield replace(proxy, url=f"http://127.0.0.1:{port}")


def change(proxy: Any, how: str, engine: FakeEngine, **body: Any) -> Any:
    answer = proxy.post(f"/api/engines/{how}", {"url": engine.url} | body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(proxy: Any) -> str:
    answer = proxy.sdk(proxy.session(is_eval=True)).chat.completions.create(model="test", messages=HELLO)
    return str(answer.choices[0].message.content)


def test_an_engine_joins_at_one_replica_and_serves_from_another(empty, proxy, fake_engine, until):
    with FakeEngine() as joining:
        change(empty, "join", joining)
        change(proxy, "drain", fake_engine)
        until(lambda: {e["url"]: e["state"] for e in empty.get("/api/engines")}.get(joining.url) == "serving")
        joining.enqueue(Reply(proxy.says("new")))
        assert ask(empty) == "new"
        joining.enqueue(Reply(proxy.says("also here")))
        assert ask(proxy) == "also here"
        assert not fake_engine.requests
        change(proxy, "resume", fake_engine)
        assert change(empty, "leave", joining)["left"]
        until(lambda: [e["url"] for e in proxy.get("/api/engines")] == [fake_engine.url])


def test_an_engine_with_another_version_is_updated_before_it_serves(proxy, until):
    with FakeEngine(version=7) as joining:
        change(proxy, "join", joining)
        until(lambda: {e["url"]: e["state"] for e in proxy.get("/api/engines")}.get(joining.url) == "serving")
        paths = [path for path, _ in joining.calls]
        assert "/generate" not in paths
        assert "/update_weights_from_disk" in paths


@pytest.mark.parametrize(
    ("url", "headers", "status", "says"),
    [
        ("http://127.0.0.1:1", {"Authorization": "Bearer run-key"}, 403, "admin"),
        ("ftp://127.0.0.1:1", ADMIN, 400, "must be http://HOST"),
        ("triton+http://127.0.0.1:1", ADMIN, 400, "names the backend 'triton'"),
        ("http://user:secret@127.0.0.1:1", ADMIN, 400, "must not contain a password"),
        ("http://gpu-3:30000", ADMIN, 400, "is not on this machine's loopback"),
        ("http://127.0.0.1:" + "1" * 300, ADMIN, 422, "url"),
    ],
)
def test_an_engine_that_may_not_join_is_refused(proxy, url, headers, status, says):
    answer = proxy.post("/api/engines/join", {"url": url}, headers=headers)
    assert (answer.status_code in (status, 400), says in answer.text) == (True, True), answer.text
    assert "secret" not in answer.text
    assert all(engine["url"] != url for engine in proxy.get("/api/engines"))


def test_agents_see_no_error_while_an_engine_dies_and_another_joins(proxy, second, until):
    """Calls run at two replicas. In each round an engine joins at one while the one before it is killed."""
    answers: list[str] = []
    problems: list[BaseException] = []
    urls: list[str] = []
    stop = threading.Event()

    def talk(replica: Any) -> None:
        while not stop.is_set():
            try:
                answers.append(ask(replica))
            except BaseException as problem:
                problems.append(problem)
                raise

    agents = [threading.Thread(target=talk, args=(replica,)) for replica in (proxy, second) * 2]
    before: FakeEngine | None = None
    for agent in agents:
        agent.start()
    try:
        for number in range(ROUNDS):
            joining = FakeEngine()
            joining.start()
            killing = threading.Thread(target=before.stop if before is not None else lambda: None)
            killing.start()  # without leaving
            change((proxy, second)[number % 2], "join", joining)
            killing.join(120)
            urls.append(joining.url)
            until(lambda joining=joining: problems or len(joining.requests) > 2)
            count = len(answers)
            until(lambda count=count: problems or len(answers) > count + 4)
            before = joining
    finally:
        stop.set()
        for agent in agents:
            agent.join(120)
        if before is not None:
            before.stop()
    assert not problems
    for url in urls:
        assert proxy.post("/api/engines/join", {"url": url, "lease_s": 1}, headers=ADMIN).status_code == 200
    until(lambda: [e["url"] for e in proxy.get("/api/engines")] == [proxy.engine.url])  # the leases are over


def test_an_engine_that_joins_with_a_key_of_its_own_needs_no_common_key(proxy, until):
    with FakeEngine() as joining:
        joining.key = derived_key("admin-key", joining.url)
        change(proxy, "join", joining, key_digest=key_digest(joining.key))
        until(lambda: {e["url"]: e["state"] for e in proxy.get("/api/engines")}.get(joining.url) == "serving")
        stored = proxy.database.query(lambda conn: str(conn.execute(select(engines)).all()))
        assert joining.key not in stored
        joining.key = None  # restarted without one: the proxies connect anew
        change(proxy, "join", joining)
        until(lambda: [e["own_key"] for e in proxy.get("/api/engines") if e["url"] == joining.url] == [False])
        change(proxy, "drain", proxy.engine)
        joining.enqueue(Reply(proxy.says("still here")))
        assert ask(proxy) == "still here"


def backends(proxy: Any) -> dict[str, str]:
    """The backend of each serving engine, by URL."""
    return {e["url"]: e["backend"] for e in proxy.get("/api/engines") if e["state"] == "serving"}


def test_engines_of_another_backend_join_or_are_listed(proxy, serve, store_url, until):
    """One that was replaced by a server of the other kind, at the same address, is connected to anew."""
    with FakeVLLM() as joining, FakeVLLM() as listed:
        change(proxy, "join", joining, backend="vllm")
        port = free_port()
        with serve(store_url, [f"vllm+{listed.url}"], port, replica="other-replica"):
            other = replace(proxy, url=f"http://127.0.0.1:{port}")
            mixed = {proxy.engine.url: "sglang", joining.url: "vllm", listed.url: "vllm"}
            until(lambda: backends(proxy) == mixed)
            change(other, "drain", joining)
            listed.enqueue(Reply(proxy.says("listed")))
            assert ask(other) == "listed"
            change(proxy, "resume", joining)
        change(proxy, "drain", proxy.engine)
        joining.enqueue(Reply(proxy.says("joined")))
        assert ask(proxy) == "joined"
        joining.stop()
        with FakeEngine(port=joining.port) as instead:
            change(proxy, "join", instead)  # the run's backend
            instead.enqueue(Reply(proxy.says("instead")))
            until(lambda: backends(proxy).get(instead.url) == "sglang")
            assert ask(proxy) == "instead"


def test_an_answer_that_goes_on_at_another_backend_names_both_engines(proxy, serve, store_url, fake_engine, until):
    with FakeVLLM() as second:
        port = free_port()
        with serve(store_url, [fake_engine.url, f"vllm+{second.url}"], port, replica="mixed"):
            mixed = replace(proxy, url=f"http://127.0.0.1:{port}")
            until(lambda: len(backends(mixed)) == 2)
            change(mixed, "drain", second)
            ids = proxy.says("hello there")
            fake_engine.enqueue(Reply(ids, hold_after=2))
            second.enqueue(Reply(ids[2:]))
            answers: list[str] = []
            asking = threading.Thread(target=lambda: answers.append(ask(mixed)))
            asking.start()
            until(lambda: fake_engine.holding == 1)
            change(mixed, "resume", second)
            fake_engine.stop()
            asking.join(120)
    assert answers == ["hello there"]
    c = interactions.c
    asked = select(c.engine_url, c.engine_backend, c.engine_spans)
    assert proxy.database.query(lambda conn: [*map(tuple, conn.execute(asked))]) == [
        (second.url, "vllm", [[fake_engine.url, "sglang", 0], [second.url, "vllm", 2]])
    ]


def test_a_key_derived_from_another_admin_key_is_refused(proxy):
    digest = key_digest(derived_key("another-key", "http://10.0.0.1:30000"))
    answer = proxy.post("/api/engines/join", {"url": "http://10.0.0.1:30000", "key_digest": digest}, headers=ADMIN)
    assert (answer.status_code, "another admin key" in answer.text) == (400, True), answer.text
    assert "http://10.0.0.1:30000" not in [engine["url"] for engine in proxy.get("/api/engines")]


async def test_an_engine_keeps_its_place_and_leaves_it(proxy, until):
    with FakeVLLM() as engine:
        async with aiohttp.ClientSession() as http:
            client = VLLMClient(engine.url, http)
            engine.key = derived_key("admin-key", engine.url)
            membership = Membership(client, http, Place(proxy.url, "admin-key", engine.url, has_own_key=True))
            keeping = asyncio.create_task(membership.keep())
            await asyncio.to_thread(until, lambda: membership.joined)
            shown = await asyncio.to_thread(proxy.get, "/api/engines")
            assert [e["backend"] for e in shown if e["url"] == engine.url] == ["vllm"]
            keeping.cancel()
            await membership.leave()
            assert not membership.joined
            assert engine.url not in [e["url"] for e in await asyncio.to_thread(proxy.get, "/api/engines")]


async def test_a_proxy_that_refuses_an_engine_ends_the_attempt(proxy):
    with FakeEngine() as engine:
        async with aiohttp.ClientSession() as http:
            client = SGLangClient(engine.url, http)
            with pytest.raises(UserError, match=f"{proxy.url} refused {engine.url}"):
                await Membership(client, http, Place(proxy.url, "wrong", engine.url)).keep()
