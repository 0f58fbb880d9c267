"""Admission: a bound that holds at every moment, counters that equal the rows, clients that wait their turn."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from databases import KINDS

from agentrl.client import Client
from agentrl.errors import RequestError
from agentrl.store.audit import run_audit
from agentrl.store.sessions import group_admission

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}
CAPACITY, CONCURRENT = 4, 3  # (max_staleness 1 + published step 0 + 1) · groups_per_step 2
CLIENTS, ROUNDS = 10, 6


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    rollout = {"group_size": 2, "min_group_size": 1, "max_concurrent_groups": CONCURRENT}
    return run_config | {"rollout": rollout}


@pytest.mark.long_on("postgresql")
def test_an_external_program_waits_until_a_place_is_free(proxy):
    groups = [proxy.post("/groups").json() for _ in range(CONCURRENT)]
    refused, let_in = Event(), Event()
    why: list[str] = []

    def wait(_seconds: float, reason: str) -> None:
        why.append(reason)
        refused.set()

    def program() -> str:
        with Client(proxy.url, "run-key", timeout_s=60, on_wait=wait) as client, client.session() as session:
            let_in.set()
            return session.id

    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(program)
        assert refused.wait(120)
        assert not let_in.is_set()
        for session in groups[0]["sessions"]:
            proxy.http.delete(f"{proxy.url}/sessions/{session['session_id']}", headers=RUN)
        session_id = playing.result(30)
    assert proxy.get(f"/sessions/{session_id}")["status"] == "completed"
    assert set(why) == {"no capacity for another group: the trainer must catch up"}


@pytest.mark.long_on("postgresql")
def test_a_program_that_will_not_wait_is_told_when_to_come_back(proxy):
    for _ in range(CONCURRENT):
        proxy.post("/sessions")
    answer = proxy.post("/sessions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
    assert float(answer.headers["retry-after"]) > 0
    client = Client(proxy.url, "run-key", timeout_s=0.49)  # less than the proxy asks it to wait
    with client, pytest.raises(RequestError, match="no capacity"), client.session():
        pytest.fail("it was admitted")
    assert proxy.get("/api/run")["admitted"] == CONCURRENT


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("path", ["/sessions", "/groups", "/rl/start_session"])
def test_a_worker_leaves_the_next_place_to_a_program_that_waits(proxy, path, monkeypatch):
    monkeypatch.setattr(group_admission, "WAITS_S", 1e6)
    worker, key = {"owner": "w/1"}, {"Authorization": "Bearer admin-key"}
    body = {"task_id": "t"} if path.startswith("/rl") else {}
    groups = [proxy.post("/groups", worker).json() for _ in range(CONCURRENT)]
    assert proxy.post(path, body, headers=key).status_code == 429
    for session in groups[0]["sessions"]:
        proxy.http.delete(f"{proxy.url}/sessions/{session['session_id']}", headers=RUN)
    assert proxy.post("/groups", worker).status_code == 429
    assert proxy.post(path, body, headers=key).is_success


class Crowd:
    """Clients of two replicas that start, play, end, fail and abandon at random, and one that watches the counters."""

    def __init__(self, urls: list[str], seed: int) -> None:
        self.urls, self.random = urls, random.Random(seed)
        self.http = httpx.AsyncClient(headers=RUN, timeout=60)
        self.samples: list[tuple[int, int]] = []
        self.started = 0

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        url = self.random.choice(self.urls)
        answer = await self.http.post(url + path, json=body if body is not None else {}, headers=headers)
        assert answer.status_code in (200, 201, 429), answer.text
        return answer

    async def watch(self) -> None:
        while True:
            run = (await self.http.get(f"{self.random.choice(self.urls)}/api/run")).json()
            self.samples.append((run["running"], run["admitted"] - run["returned"]))

    async def client(self, name: str) -> None:
        for number in range(ROUNDS):
            kind = self.random.choice(["group", "group", "external", "evaluation"])
            body = {"group": {"owner": name}, "external": {}, "evaluation": {"is_eval": True, "task": {}}}[kind]
            path = "/sessions" if kind == "external" else "/groups"
            key = {"Idempotency-Key": f"{name} {number}"}
            answer = await self.post(path, body, **key)
            if self.random.random() < 0.3:  # its reply was lost
                again = await self.post(path, body, **key)
                answer = answer if answer.status_code == 201 else again
            if answer.status_code == 429:
                await asyncio.sleep(self.random.random() / 20)
                continue
            self.started += 1
            opened = answer.json()
            if kind == "group" and self.random.random() < 0.2:
                await self.post("/groups/abandon", {"owner": name})
                continue
            ends = [self.finish(session) for session in opened.get("sessions", [opened])]
            await asyncio.gather(*ends)

    async def finish(self, session: dict[str, Any]) -> None:
        path = f"/sessions/{session['session_id']}"
        how = self.random.choice(["play", "silent", "fail", "fail", "abandon", "abandon"])
        if how == "play":
            message = {"model": "test", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
            await self.post(f"{path}/v1/chat/completions", message)
            await self.post(f"{path}/reward", {"value": self.random.random()})
        if how == "abandon":
            await self.http.delete(self.random.choice(self.urls) + path)
        else:
            await self.post(f"{path}/end", {"status": "failed" if how == "fail" else "completed"})

    async def play(self) -> None:
        async with self.http, asyncio.TaskGroup() as group:
            watching = group.create_task(self.watch())
            async with asyncio.TaskGroup() as clients:
                for i in range(CLIENTS):
                    clients.create_task(self.client(f"w{i}"))
            watching.cancel()


@pytest.mark.long_on("sqlite")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_counters_and_bound_hold_for_many_clients_of_two_replicas(proxy, second, seed):
    crowd = Crowd([proxy.url, second.url], seed)
    await crowd.play()
    assert crowd.started > CAPACITY  # places were given back
    assert max(running for running, _ in crowd.samples) <= CONCURRENT
    assert max(taken for _, taken in crowd.samples) <= CAPACITY
    run = proxy.get("/api/run")
    assert run["running"] == 0
    assert run["groups"].get("ready", 0) == run["admitted"] - run["returned"] <= CAPACITY
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []
