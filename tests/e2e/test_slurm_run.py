"""A run that a real Slurm places: a real engine, two proxies, two rollout workers, a trainer on two hosts, PostgreSQL.

A host with a rank of the trainer is lost, and the spare host takes its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Cluster, cluster, missing

from agentrl.environment import DATABASE_URL
from agentrl.store import Database, part_ranks, runs
from agentrl.store.audit import run_audit
from agentrl.store.training import steps

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 8
CONFIG = {
    "name": "placed",
    "model": "tiny",
    "agent": "agentrl.agents.reverse:ReverseAgent",
    "tasks": "agentrl.agents.reverse:train_tasks",
    "steps": STEPS,
    "placement": "slurm",
    "resources": {"proxies": 2, "rollout_workers": 2, "trainer": {"ranks": 2, "hosts": 2}},
    "slurm": {"spare_nodes": 1, "gpus_per_node": 1},
    "rollout": {"group_size": 4, "max_concurrent_groups": 4},
    "trainer": {"groups_per_step": 4, "max_staleness": 1, "lr": 5e-4, "device": "cpu"},
    "engine": {"device": "cpu"},
}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "slurm", hosts=3, gpus=1) as found:
        yield found


class Run:
    """The command that submits the job and follows it, and the run's database."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
        self.log = folder / "command.log"
        self.database = Database(database_url)
        with self.log.open("wb") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "agentrl", "train", "run.yaml"],
                cwd=folder,
                env=os.environ | {DATABASE_URL: database_url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        """The end of each log."""
        files = [self.log, *sorted((self.folder / "runs" / "placed" / "logs").glob("*"))]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in files)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.command.poll() is None, self.said()
            time.sleep(0.5)

    def published(self) -> int:
        known = self.database.query(runs.find, "placed")
        return known.published_step if known else 0

    def ranks(self) -> dict[str, part_ranks.Rank]:
        with self.database.read() as conn:
            found = part_ranks.ranks(conn, runs.by_name(conn, "placed").id)
        return {f"{rank.part}/{rank.rank}": rank for rank in found}


@pytest.fixture
def run(slurm: Cluster, tmp_path: Path, empty_database_url: str) -> Iterator[Run]:
    started = Run(tmp_path, empty_database_url)
    yield started
    started.command.terminate()
    started.command.wait(60)
    started.database.close()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_a_run_on_slurm_survives_a_lost_host(slurm: Cluster, run: Run) -> None:
    run.database.upgrade()
    run.until(lambda: run.published() >= 2)
    before = run.ranks()
    host = slurm_host(before["trainer/1"].pid)
    slurm.lose(host)
    assert run.command.wait(1000) == 0, run.said()

    with run.database.read() as conn:
        run_id = runs.by_name(conn, "placed").id
        assert list(run_audit.scan(conn, run_id)) == []
        lineage = [step.step for step in steps.of_run(conn, run_id) if step.state == "published"]
    assert lineage == list(range(1, STEPS + 1))
    after = run.ranks()
    assert {after[f"trainer/{rank}"].attempt for rank in (0, 1)} == {2}
    assert not any(rank.live for rank in after.values())
    assert json.loads((run.folder / "runs" / "placed" / "summary.json").read_text())["steps"] == STEPS
    slurm.until("squeue", "--noheader", answer="")


def slurm_host(pid: int | None) -> str:
    """The Slurm host of a process."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(line for line in variables if line.startswith(b"SLURMD_NODENAME=")).partition(b"=")[2].decode()
