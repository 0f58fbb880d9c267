"""`agentrl proxy --workers N` as real processes: any worker serves any session, and one that is killed comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from liveness import is_alive
from serving import add_version
from sqlalchemy import select

from agentrl.engine.server_process import free_port
from agentrl.proxy.serving import prefork
from agentrl.rendering import load_renderer
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.tables import engines, heartbeats, interactions

RUN = {"Authorization": "Bearer run-key"}
ADMIN = {"Authorization": "Bearer admin-key"}
DATABASE_KINDS = [pytest.param("sqlite", marks=pytest.mark.long), "postgresql"]


@dataclass
class Workers:
    """The command, running."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    database: Database
    run_id: str

    def pids(self) -> list[int]:
        """Those of the workers that are there now."""
        try:
            children = psutil.Process(self.process.pid).children()
            return [child.pid for child in children if "agentrl.proxy.serving.replica" in child.cmdline()]
        except psutil.NoSuchProcess:
            return []

    def post(self, path: str, body: Any, headers: dict[str, str] = RUN) -> httpx.Response:
        """Over a connection of its own, which any worker may take."""
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def session(self) -> dict[str, Any]:
        answer = self.post("/groups", {"is_eval": True, "task": {}})
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()["sessions"][0]
        return opened

    def chat(self, session: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    def replicas(self) -> set[str]:
        """The workers that have beaten in the store."""
        with self.database.read() as conn:
            return set(conn.execute(select(heartbeats.c.name).where(heartbeats.c.kind == "proxy")).scalars())

    def served(self) -> set[str]:
        """The workers that have sampled a call."""
        with self.database.read() as conn:
            return set(conn.execute(select(interactions.c.replica)).scalars())

    def violations(self) -> list[str]:
        with self.database.read() as conn:
            return list(run_audit.scan(conn, self.run_id))

    def serves(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def command(
    url: str, engine_url: str, folder: Path, *, count: int = 2, port: int | None = None, run: str = "test"
) -> Iterator[Workers]:
    """Run `agentrl proxy --workers COUNT` until the block ends."""
    port = port or free_port()
    argv = ["proxy", "--run", run, "--engine", engine_url, "--port", str(port), "--workers", str(count)]
    env = os.environ | {"AGENTRL_DATABASE_URL": url, "AGENTRL_ADMIN_KEY": "admin-key", "TMPDIR": str(folder)}
    log = folder / "proxy.log"
    database = Database(url)
    with database.read() as conn:
        run_id = runs.by_name(conn, "test").id
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-m", "agentrl", *argv], env=env, stdout=out, stderr=out)
    found = Workers(process, f"http://127.0.0.1:{port}", log, database, run_id)
    try:
        yield found
    finally:
        started = found.pids()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        database.close()
        assert not [pid for pid in started if is_alive(pid)], log.read_text()


@pytest.fixture
def two(store_url: str, fake_engine: Any, tmp_path: Path, until: Callable[..., Any]) -> Iterator[Workers]:
    """Two workers, both serving."""
    with command(store_url, fake_engine.url, tmp_path) as found:
        until(lambda: found.log.read_text().count(" serves ") == 2 or found.process.poll() is not None)
        assert found.process.poll() is None, found.log.read_text()
        yield found


@pytest.mark.parametrize("database_kind", DATABASE_KINDS)
def test_any_worker_serves_any_session_and_parallel_calls_make_one_correct_tree(two, until):
    session = two.session()
    first = [{"role": "user", "content": "hello"}]
    first.append(two.chat(session, first))
    ends: list[list[dict[str, Any]]] = []

    def branch(index: int) -> None:
        messages = [*first, {"role": "user", "content": f"branch {index}"}]
        for turn in range(3):
            messages += [two.chat(session, messages), {"role": "user", "content": f"turn {turn}"}]
        ends.append(messages)

    threads = [threading.Thread(target=branch, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(ends) == 8, two.log.read_text()
    port = two.url.rpartition(":")[2]
    until(lambda: len(two.served()) == 2 or not two.chat(session, first[:1]))  # the other one takes calls too
    assert {name.split(":", 1)[1] for name in two.served()} == {f"{port}/0", f"{port}/1"}
    calls = httpx.get(f"{two.url}/sessions/{session['session_id']}/trace", headers=RUN).json()["calls"]
    children = [call["parent_id"] for call in calls if call["parent_id"] is not None]
    assert children.count(calls[0]["id"]) == 8, "a branch did not find its parent"
    assert len(children) == 24
    assert len({parent for parent in children if parent != calls[0]["id"]}) == 16, "a turn did not find its parent"
    answer = two.post(f"/sessions/{session['session_id']}/end", {})
    assert answer.status_code == 200
    assert two.violations() == []


@pytest.mark.parametrize("database_kind", DATABASE_KINDS)
def test_service_and_sessions_go_on_when_workers_are_killed_under_load(two, until):
    stop = threading.Event()
    delivered: dict[str, set[str]] = {}
    breaks: list[str] = []
    problems: list[str] = []

    def agent() -> None:
        session = two.session()
        seen = delivered.setdefault(session["session_id"], set())
        messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
        while not stop.is_set():
            path = f"/sessions/{session['session_id']}/v1/chat/completions"
            try:
                answer = two.post(path, {"messages": messages})
            except httpx.TransportError as error:  # it was with the one that died
                breaks.append(str(error))
                continue
            if answer.status_code != 200:
                problems.append(answer.text)
                return
            body = answer.json()
            seen.add(body["id"].removeprefix("chatcmpl-"))
            messages += [body["choices"][0]["message"], {"role": "user", "content": "more"}]
            del messages[20:]

    threads = [threading.Thread(target=agent) for _ in range(4)]
    for thread in threads:
        thread.start()
    rng = random.Random(0)
    for _ in range(3):
        until(lambda: (len(delivered) == 4 and all(delivered.values())) or problems)
        before = {name: len(seen) for name, seen in delivered.items()}
        victim = rng.choice(two.pids())
        os.kill(victim, signal.SIGKILL)
        until(lambda gone=victim: len(two.pids()) == 2 and gone not in two.pids())
        until(lambda at=before: all(len(delivered[name]) > at[name] + 2 for name in at) or problems)
    stop.set()
    for thread in threads:
        thread.join(120)
    assert problems == []
    assert two.process.poll() is None
    with two.database.read() as conn:
        rows = conn.execute(select(interactions.c.id, interactions.c.status)).all()
    complete = {row.id for row in rows if row.status == "complete"}
    assert set().union(*delivered.values()) <= complete
    until(lambda: not running(two))  # the restarted workers have declared lost what died
    assert two.violations() == []
    assert two.log.read_text().count("starting it again") == 3
    assert len(two.replicas()) == 2, "a restarted worker took another name"


def running(two: Workers) -> int:
    with two.database.read() as conn:
        return len(conn.execute(select(interactions.c.id).where(interactions.c.status == "running")).all())


@pytest.mark.long
def test_a_publish_of_one_worker_is_not_repeated_by_the_others(two, fake_engine, until, tmp_path):
    states: set[str] = set()

    def version() -> int | None:
        with two.database.read() as conn:
            row = conn.execute(select(engines.c.state, engines.c.version)).one()
        states.add(row.state)
        return row.version if row.state == "serving" else None

    until(lambda: version() == 0)
    states.clear()
    session = two.session()
    for number in (1, 2, 3):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        add_version(two.database, two.run_id, number, folder)
        answer = two.post("/admin/publish", {"version": number}, ADMIN)
        assert answer.status_code == 200, answer.text
        for turn in range(12):
            two.chat(session, [{"role": "user", "content": f"{number} {turn}"}])
            assert version() == number
    calls = httpx.get(f"{two.url}/sessions/{session['session_id']}/trace", headers=RUN).json()["calls"]
    assert len(two.served()) == 2
    assert [call["version_spans"][0][0] for call in calls] == [1] * 12 + [2] * 12 + [3] * 12
    assert states <= {"serving", "updating"}
    assert [path for path, _ in fake_engine.calls].count("/update_weights_from_disk") == 3, "it was loaded again"


def test_sigterm_ends_all_of_them_and_no_secret_is_on_a_command_line(two, store_url):
    pids = two.pids()
    for pid in [two.process.pid, *pids]:
        argv = " ".join(psutil.Process(pid).cmdline())
        assert "admin-key" not in argv
        assert store_url not in argv
    two.process.send_signal(signal.SIGTERM)
    assert two.process.wait(120) == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert not list(two.log.parent.glob("agentrl-metrics-*"))


def test_the_workers_of_a_dead_parent_end(two, until):
    pids = two.pids()
    two.process.kill()
    until(lambda: not [pid for pid in pids if is_alive(pid)])


@pytest.mark.long
def test_ctrl_c_reaches_every_process_and_means_one_stop(two):
    pids = two.pids()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert two.serves()
    two.process.send_signal(signal.SIGINT)
    assert two.process.wait(120) == 0
    assert "Traceback" not in two.log.read_text()


@pytest.mark.long
def test_a_configuration_error_is_printed_once(store_url, fake_engine, tmp_path):
    with command(store_url, fake_engine.url, tmp_path, run="nosuch") as found:
        assert found.process.wait(120) == 2
    lines = found.log.read_text().splitlines()
    assert [line for line in lines if line.startswith("agentrl: ")] == lines[-1:], lines
    assert "nosuch" in lines[-1]


@pytest.mark.long
def test_a_scrape_of_any_worker_shows_all_of_them_and_no_call_is_forgotten_with_a_worker(two, until):
    session = two.session()
    count = 0
    while len(two.served()) < 2 or count < 6:
        two.chat(session, [{"role": "user", "content": f"hello {count}"}])
        count += 1
    for pid in two.pids():
        os.kill(pid, signal.SIGKILL)
        until(lambda gone=pid: len(two.pids()) == 2 and gone not in two.pids())
        until(two.serves)
        for _ in range(4):
            text = httpx.get(f"{two.url}/metrics", headers=RUN, timeout=120).text
            assert f'agentrl_calls_total{{dialect="openai.chat",status="200"}} {float(count)}' in text
            assert "agentrl_calls_in_flight 0.0" in text


def test_a_job_survives_its_command_line():
    job = prefork.Job(run_name="a b", engine_urls=["http://x"], replica="h:1", log_level="info", listener=3)
    assert prefork.Job(**json.loads(job.argv()[-1])) == job


def test_the_renderer_is_not_loaded_by_the_parent(tiny_model):
    heavy = "{'fastapi', 'tokenizers', 'uvicorn'}"
    code = f"import sys, agentrl.proxy.serving.prefork; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert load_renderer(tiny_model)
