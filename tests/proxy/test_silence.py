"""Silent participants are noticed by any replica: workers, programs and proxies that die.

The clock of this process stands still until a test moves it, so nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from databases import KINDS
from sqlalchemy import insert, select

from agentrl.client import Client
from agentrl.engine.server_process import free_port
from agentrl.proxy.calls import sweep
from agentrl.proxy.calls.sweep import Sweep, Uptime
from agentrl.store.audit import run_audit
from agentrl.store.tables import heartbeats
from agentrl.testing import Reply

both = pytest.mark.parametrize("database_kind", KINDS)
TIMEOUT_S = 3600.0
"""Longer than any test: a process with a clock of its own sees nobody as silent."""
WORKER_TIMEOUT_S = 3.0
"""A worker sends a heartbeat every half second of its own clock."""
STEPS_PER_TIMEOUT = 10  # a replica that misses a quarter of the timeout counts it as an outage
AGENT = """
import asyncio

class Agent:
    async def run(self, data, **extra):
        await asyncio.Event().wait()
"""


class Clock:
    """`time.time` of this process. `replica` has sent a heartbeat and swept after each step of it."""

    def __init__(self, timeout_s: float, until: Callable[..., Any]) -> None:
        self.now = time.time()
        self.step_s = timeout_s / STEPS_PER_TIMEOUT
        self.done: Counter[str] = Counter()  # beats and sweeps of the replica that ended
        self._until = until

    def time(self) -> float:
        return self.now

    def step(self, steps: int = 1) -> None:
        """Move by tenths of the timeout."""
        for _ in range(steps):
            self.now += self.step_s
            before = self.done.copy()  # the next to end may have begun before the step, the one behind it has not
            self._until(lambda before=before: all(self.done[name] >= before[name] + 2 for name in ("beat", "once")))

    def move_until(self, condition: Callable[[], Any]) -> None:
        """Step until a condition is true, for three timeouts at most."""
        for _ in range(3 * STEPS_PER_TIMEOUT):
            if condition():
                return
            self.step()
        raise AssertionError("the condition did not come true")


@pytest.fixture
def timeout_s() -> float:
    return TIMEOUT_S


@pytest.fixture
def run_config(run_config: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    return run_config | {
        "proxy": {"heartbeat_timeout_s": timeout_s, "session_timeout_s": timeout_s, "end_grace_s": 100 * timeout_s},
        "rollout": {"group_size": 2, "min_group_size": 1},
    }


@pytest.fixture(autouse=True)
def clock(timeout_s: float, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(timeout_s, until)

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        async def run(self: Sweep, uptime: Uptime) -> None:
            await step(self, uptime)
            if self.store.replica == "test-replica":
                made.done[step.__name__] += 1

        return run

    monkeypatch.setattr(time, "time", made.time)
    monkeypatch.setattr(sweep, "EVERY_S", 0.01)
    for step in (Sweep.beat, Sweep.once):
        monkeypatch.setattr(Sweep, step.__name__, counted(step))
    return made


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


@pytest.mark.long_on("postgresql")
@both
@pytest.mark.parametrize("timeout_s", [WORKER_TIMEOUT_S])
def test_a_worker_that_is_killed_gives_its_places_back(proxy, clock, run_config, tmp_path, until):
    (tmp_path / "hanging_agent.py").write_text(AGENT)
    config = run_config | {"agent": "hanging_agent:Agent"}
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"tasks": "tasks.jsonl"}))
    command = ["rollout", "--config", "run.yaml", "--url", proxy.url, "--run-key", "run-key", "--owner", "w"]

    def worker_has_beaten() -> bool:
        seen = select(heartbeats.c.last_seen_at).where(heartbeats.c.kind == "worker", heartbeats.c.name.like("w/%"))
        with proxy.database.read() as conn:
            return bool(conn.scalar(seen) == clock.now)

    with killed(command, {}, tmp_path) as worker:
        until(lambda: proxy.get("/api/run")["running"] == 4)
        silent = proxy.post("/groups", {"is_eval": True, "task": {}, "owner": "silent"}).json()["sessions"][0]
        for _ in range(2):  # longer than the timeout, with heartbeats of the worker only
            clock.step(STEPS_PER_TIMEOUT * 3 // 4)
            until(worker_has_beaten)
        assert status(proxy, silent["session_id"]) == "abandoned"
        assert proxy.get("/api/run")["running"] == 4
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        clock.move_until(lambda: gone(proxy, 4))
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


@pytest.mark.long_on("postgresql")
@both
def test_a_session_without_heartbeats_is_abandoned_and_one_with_heartbeats_is_not(proxy, clock):
    with Client(proxy.url, "run-key", timeout_s=20) as client, client.session() as beating:
        leaving = client.session()
        leaving.__enter__()

        def left() -> bool:
            assert beating.heartbeat()
            return status(proxy, leaving.id) == "abandoned"

        clock.move_until(left)
        assert proxy.get(f"/sessions/{leaving.id}")["error"] == "it was not used for too long"
        assert not leaving.heartbeat()
        assert beating.reward(1.0)
    assert status(proxy, beating.id) == "completed"


def test_a_session_whose_call_runs_is_never_abandoned(proxy, clock):
    proxy.engine.enqueue(Reply(proxy.says("hi"), hold_after=1))
    with Client(proxy.url, "run-key", timeout_s=20) as client, client.session() as busy:
        session = {"base_url": busy.base_url, "api_key": busy.api_key}
        messages = [{"role": "user", "content": "ab"}]
        with proxy.sdk(session).chat.completions.create(model="test", messages=messages, stream=True) as stream:
            next(iter(stream))
            clock.step()
            idle = client.session()
            idle.__enter__()  # begins to be silent later than the busy one
            clock.move_until(lambda: status(proxy, idle.id) == "abandoned")
            assert status(proxy, busy.id) == "open"
            proxy.engine.release()
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"


@pytest.mark.long_on("postgresql")
@both
def test_any_replica_ends_the_sessions_of_a_stopped_replica(proxy, clock, serve, store_url):
    port = free_port()
    with serve(store_url, [proxy.engine.url], port, replica="gone"):
        url = f"http://127.0.0.1:{port}"
        opened = [
            proxy.http.post(f"{url}{path}", json=body, headers={"Authorization": "Bearer run-key"}).json()
            for path, body in [("/groups", {"owner": "w"}), ("/sessions", {})]
        ]
    sessions = [*opened[0]["sessions"], opened[1]]
    clock.move_until(lambda: gone(proxy, 2))
    assert {status(proxy, s["session_id"]) for s in sessions} == {"abandoned"}


@pytest.mark.long_on("postgresql")
@both
def test_the_running_call_of_a_killed_replica_is_lost_and_its_session_ends(proxy, clock, store_url, tmp_path, until):
    """The call would keep the ended session open for `end_grace_s`, which is a hundred timeouts."""
    port = free_port()
    command = ["proxy", "--run", "test", "--engine", proxy.engine.url, "--port", str(port)]
    with killed(command, {"AGENTRL_DATABASE_URL": store_url, "AGENTRL_ADMIN_KEY": "admin-key"}, tmp_path) as replica:
        until(lambda: serves(proxy, port))
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
    clock.move_until(lambda: status(proxy, session["session_id"]) == "completed")
    (call,) = proxy.calls(session)
    assert call["status"] == "lost"
    assert gone(proxy)


def test_starting_a_group_counts_as_a_heartbeat_of_its_worker(proxy):
    """A slow first heartbeat cannot make the worker count as dead."""
    proxy.post("/groups", {"owner": "w"})
    with proxy.database.read() as conn:
        rows = conn.execute(heartbeats.select().where(heartbeats.c.kind == "worker")).all()
    assert [row.name for row in rows] == ["w"]


def test_a_replica_sends_a_heartbeat_when_it_starts(proxy):
    with proxy.database.read() as conn:
        rows = conn.execute(heartbeats.select().where(heartbeats.c.kind == "proxy")).all()
    assert [row.name for row in rows] == ["test-replica"]


def test_a_replica_that_died_long_ago_does_not_keep_others_from_being_noticed(proxy, clock):
    with proxy.database.write() as conn:
        conn.execute(
            insert(heartbeats).values(run_id=proxy.run_id, kind="proxy", name="old", started_at=0.0, last_seen_at=0.0)
        )
    proxy.post("/groups", {"owner": "w"})
    clock.move_until(lambda: gone(proxy))
