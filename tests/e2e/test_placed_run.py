"""A run whose processes a scheduler places: two proxies, two rollout workers, a trainer over two hosts, PostgreSQL.

A killed rank of the trainer restarts the whole trainer, once. A killed supervisor attaches again, and restarts nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from chaos import process_scheduler

from agentrl.engine.server_process import Server
from agentrl.environment import DATABASE_URL, ENGINE_KEY
from agentrl.store import Connection, Database, Row, events, part_ranks, runs
from agentrl.store.audit import run_audit
from agentrl.store.part_ranks import Rank
from agentrl.store.training import steps

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 6
SCHEDULER = process_scheduler.__file__


class Placed:
    """The run, its supervisor, and what the database says of its processes."""

    def __init__(self, folder: Path, database_url: str, engine: Server) -> None:
        self.folder = folder
        self.env = os.environ | {DATABASE_URL: database_url, ENGINE_KEY: engine.spec.key or ""}
        self.database = Database(database_url)
        config = {
            "name": "placed",
            "model": "tiny",
            "agent": "agentrl.agents.reverse:ReverseAgent",
            "tasks": "agentrl.agents.reverse:train_tasks",
            "steps": STEPS,
            "placement": "ray",  # any but local; the scheduler of the tests places it
            "resources": {"proxies": 2, "rollout_workers": 2, "trainer": {"ranks": 2, "hosts": 2}},
            "rollout": {"group_size": 4, "max_concurrent_groups": 4},
            "trainer": {"groups_per_step": 4, "max_staleness": 1, "lr": 5e-4, "device": "cpu"},
            "engine": {"urls": [engine.url], "device": "cpu"},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.supervisors: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "supervisor.log").open("ab") as log:
            argv = [sys.executable, SCHEDULER, "run.yaml"]
            process = subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=log, stderr=log)
        self.supervisors.append(process)
        return process

    def read(self, query: Callable[[Connection, Row[Any]], Any]) -> Any:
        with self.database.read() as conn:
            return query(conn, runs.by_name(conn, "placed"))

    def ranks(self) -> dict[str, Rank]:
        found: list[Rank] = self.read(lambda conn, run: part_ranks.ranks(conn, run.id))
        return {f"{rank.part}/{rank.rank}": rank for rank in found}

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.supervisors[-1].poll() is None, (self.folder / "supervisor.log").read_text()[-3000:]
            time.sleep(0.2)

    def published(self, step: int) -> bool:
        known = self.database.query(runs.find, "placed")
        return known is not None and known.published_step >= step

    def deaths(self) -> list[tuple[str, int]]:
        recorded = self.read(lambda conn, run: events.of_run(conn, run.id, "part_died"))
        return [(event.data["part"], event.data["rank"]) for event in recorded]

    def started(self) -> list[int]:
        recorded = self.read(lambda conn, run: events.of_run(conn, run.id, "part_started"))
        return [event.data["pid"] for event in recorded]

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for the run: its folder is in each command line."""
        found = psutil.process_iter(["cmdline"])
        return [process for process in found if str(self.folder) in " ".join(process.info["cmdline"] or [])]

    def end(self) -> None:
        for process in self.supervisors:
            process.kill()
            process.wait()
        for process in self.processes():
            process.kill()
        self.database.close()


@pytest.fixture
def placed(tmp_path: Path, empty_database_url: str, sglang_engine: Server) -> Iterator[Placed]:
    placed = Placed(tmp_path.resolve(), empty_database_url, sglang_engine)
    placed.database.upgrade()
    yield placed
    placed.end()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_a_placed_run_survives_a_killed_rank_and_a_killed_supervisor(placed: Placed) -> None:
    supervisor = placed.start()
    placed.until(lambda: placed.published(1))
    victim = placed.ranks()["trainer/1"]
    assert victim.pid is not None
    psutil.Process(victim.pid).kill()  # the guard: all that it started ends
    placed.until(lambda: placed.published(3))
    assert placed.deaths() == [("trainer", 1)]
    assert {placed.ranks()[name].attempt for name in ("trainer/0", "trainer/1")} == {2}

    before = {name: rank.pid for name, rank in placed.ranks().items()}
    supervisor.kill()
    supervisor.wait()
    supervisor = placed.start()
    assert supervisor.wait(400) == 0, (placed.folder / "supervisor.log").read_text()[-3000:]
    started = placed.read(
        lambda conn, run: [event.data["pid"] for event in events.of_run(conn, run.id, "part_started")]
    )
    assert set(before.values()) <= set(started)
    assert len(started) == len(before) + 2  # the trainer's two ranks started twice, all others once

    assert placed.read(lambda conn, run: list(run_audit.scan(conn, run.id))) == []
    lineage = placed.read(lambda conn, run: [(s.step, s.state) for s in steps.of_run(conn, run.id)])
    assert [step for step, state in lineage if state == "published"] == list(range(1, STEPS + 1))
    summary = json.loads((placed.folder / "runs" / "placed" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert not any(rank.live for rank in placed.ranks().values())
    assert placed.processes() == []
