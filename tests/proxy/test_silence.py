"""Whoever falls silent is noticed by any replica: workers, programs and proxies that die, with short time-outs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from databases import KINDS
from sqlalchemy import insert

from agentrl.client import Client
from agentrl.engine.server_process import free_port
from agentrl.store.audit import run_audit
from agentrl.store.tables import heartbeats
from agentrl.testing import Reply

both = pytest.mark.parametrize("database_kind", KINDS)
AGENT = """
import asyncio

class Agent:
    async def run(self, data, **extra):
        await asyncio.Event().wait()
"""


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {
        "proxy": {"heartbeat_timeout_s": 4.0, "session_timeout_s": 4.0, "end_grace_s": 3600.0},
        "rollout": {"group_size": 2, "min_group_size": 1},
    }


@contextmanager
def killed(command: list[str], env: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that dies by SIGKILL at the latest when the block ends."""
    with (cwd / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", *command], env=os.environ | env, cwd=cwd, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def status(proxy: Any, session_id: str) -> str:
    return str(proxy.get(f"/sessions/{session_id}")["status"])


def serves(proxy: Any, port: int) -> bool:
    try:
        return bool(proxy.http.get(f"http://127.0.0.1:{port}/health").is_success)
    except httpx.ConnectError:
        return False


def gone(proxy: Any, count: int = 1) -> bool:
    run = proxy.get("/api/run")
    return (int(run["returned"]), int(run["running"])) == (count, 0)


@both
def test_a_worker_that_is_killed_gives_its_places_back(proxy, run_config, tmp_path, until):
    (tmp_path / "hanging_agent.py").write_text(AGENT)
    config = run_config | {"agent": "hanging_agent:Agent"}
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"tasks": "tasks.jsonl"}))
    command = ["rollout", "--config", "run.yaml", "--url", proxy.url, "--run-key", "run-key", "--owner", "w"]
    with killed(command, {}, tmp_path) as worker:
        until(lambda: proxy.get("/api/run")["running"] == 4)
        # It plays for longer than it may be silent: another's sessions are abandoned, its own are not.
        stranger = proxy.post("/groups", {"is_eval": True, "task": {}, "owner": "silent"}).json()["sessions"][0]
        until(lambda: status(proxy, stranger["session_id"]) == "abandoned")
        assert proxy.get("/api/run")["running"] == 4
        worker.send_signal(signal.SIGKILL)
        until(lambda: gone(proxy, 4))
    with proxy.database.read() as conn:
        assert run_audit.violations(conn, proxy.run_id) == []


@both
def test_a_program_that_goes_away_is_noticed_and_one_that_beats_is_not(proxy, until):
    with Client(proxy.url, "run-key", timeout_s=20) as client, client.session() as beating:
        leaving = client.session()
        leaving.__enter__()

        def left() -> bool:
            assert beating.heartbeat()
            return status(proxy, leaving.id) == "abandoned"

        until(left)
        assert proxy.get(f"/sessions/{leaving.id}")["error"] == "it was not used for too long"
        assert not leaving.heartbeat()
        assert beating.reward(1.0)
    assert status(proxy, beating.id) == "completed"


def test_a_session_whose_call_runs_is_never_abandoned(proxy, until):
    proxy.engine.enqueue(Reply(proxy.says("hi"), hold_after=1))
    with Client(proxy.url, "run-key", timeout_s=20) as client, client.session() as busy:
        session = {"base_url": busy.base_url, "api_key": busy.api_key}
        messages = [{"role": "user", "content": "ab"}]
        with proxy.sdk(session).chat.completions.create(model="test", messages=messages, stream=True) as stream:
            next(iter(stream))
            idle = client.session()
            idle.__enter__()  # begins to be silent later than the busy one
            until(lambda: status(proxy, idle.id) == "abandoned")
            assert status(proxy, busy.id) == "open"
            proxy.engine.release()
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"


@both
def test_any_replica_ends_what_anothers_clients_left(proxy, serve, store_url, until):
    port = free_port()
    with serve(store_url, [proxy.engine.url], port, replica="gone"):
        url = f"http://127.0.0.1:{port}"
        opened = [
            proxy.http.post(f"{url}{path}", json=body, headers={"Authorization": "Bearer run-key"}).json()
            for path, body in [("/groups", {"owner": "w"}), ("/sessions", {})]
        ]
    sessions = [*opened[0]["sessions"], opened[1]]
    until(lambda: gone(proxy, 2))
    assert {status(proxy, s["session_id"]) for s in sessions} == {"abandoned"}


@both
def test_what_a_killed_replica_was_sampling_is_lost_and_its_sessions_end(proxy, store_url, tmp_path, until):
    """Its call would hold the ended session for an hour (`end_grace_s`)."""
    port = free_port()
    command = ["proxy", "--run", "test", "--engine", proxy.engine.url, "--port", str(port)]
    with killed(command, {"AGENTRL_DATABASE_URL": store_url, "AGENTRL_ADMIN_KEY": "admin-key"}, tmp_path) as replica:
        until(lambda: serves(proxy, port), 60)
        session, other = proxy.post("/groups", {"owner": "w"}).json()["sessions"]
        proxy.engine.enqueue(Reply(proxy.says("hi"), hold_after=1))
        moved = session | {"base_url": f"http://127.0.0.1:{port}/sessions/{session['session_id']}/v1"}
        messages = [{"role": "user", "content": "ab"}]
        with proxy.sdk(moved).chat.completions.create(model="test", messages=messages, stream=True) as stream:
            next(iter(stream))
            replica.send_signal(signal.SIGKILL)
            replica.wait()
    proxy.engine.release()
    for each in (session, other):
        proxy.post(f"/sessions/{each['session_id']}/end")
    assert status(proxy, session["session_id"]) == "closing"
    until(lambda: status(proxy, session["session_id"]) == "completed")
    (call,) = proxy.calls(session)
    assert call["status"] == "lost"
    assert gone(proxy)


def test_a_worker_that_only_started_a_group_counts_as_heard(proxy):
    """Its row in `heartbeats` is there with the group, so that a slow first beat cannot be its death."""
    proxy.post("/groups", {"owner": "w"})
    with proxy.database.read() as conn:
        rows = conn.execute(heartbeats.select().where(heartbeats.c.kind == "worker")).all()
    assert [row.name for row in rows] == ["w"]


def test_a_replica_is_heard_of_from_its_start(proxy):
    with proxy.database.read() as conn:
        rows = conn.execute(heartbeats.select().where(heartbeats.c.kind == "proxy")).all()
    assert [row.name for row in rows] == ["test-replica"]


def test_long_dead_names_do_not_matter(proxy, until):
    """A name that nobody uses any more has no calls to lose, and keeps nobody from being noticed."""
    with proxy.database.write() as conn:
        conn.execute(
            insert(heartbeats).values(run_id=proxy.run_id, kind="proxy", name="old", started_at=0.0, last_seen_at=0.0)
        )
    proxy.post("/groups", {"owner": "w"})
    until(lambda: gone(proxy))
