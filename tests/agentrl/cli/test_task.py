"""`agentrl task` as a process: its command ends when it is killed, and its successor waits for its lease."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.environment import DATABASE_URL
from agentrl.placement import folder_proof
from agentrl.placement.folder_proof import add_token
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.run_secrets import write_secrets
from agentrl.store import Database, part_ranks

SLEEP = "import time; time.sleep(600)"


def task(folder: Path, *args: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "agentrl", "task", "--folder", str(folder), "--part", "engine-0", *args]
    return subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def db(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/agentrl.db")
    database.upgrade()
    with database.write() as conn:
        run_id = create_run(conn, name="placed", task_data=[{}], steps=10)
    spec = PartSpec(name="engine-0", argv=("{python}", "-c", SLEEP))
    database.transact(part_ranks.declare, run_id, {"engine-0": spec.model_dump(mode="json")})
    (tmp_path / "config.yaml").write_text("name: placed")
    write_secrets(tmp_path, {DATABASE_URL: database.url})
    yield database, run_id
    database.close()


def running(db: Database, run_id: str) -> part_ranks.Rank:
    while True:
        ranks = db.query(part_ranks.ranks, run_id)
        if ranks and ranks[0].state == "running":
            return ranks[0]
        time.sleep(0.05)


def test_a_killed_task_leaves_nothing_and_its_successor_goes_on_after_its_lease(db, tmp_path):
    database, run_id = db
    first = task(tmp_path)
    guard = psutil.Process(running(database, run_id).pid)
    family = [guard, *guard.children(recursive=True)]
    first.kill()
    first.communicate()
    psutil.wait_procs(family, timeout=60)
    assert not any(process.is_running() for process in family)

    second = task(tmp_path)
    assert "waiting for the lease of another task runner" in second.stdout.readline()
    database.transact(part_ranks.renew, run_id, "engine-0", 0, database.query(part_ranks.ranks, run_id)[0].runner, -1.0)
    while running(database, run_id).pid == guard.pid:
        time.sleep(0.05)
    database.transact(part_ranks.stop, run_id)
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert not database.query(part_ranks.ranks, run_id)[0].live


def test_a_terminated_task_releases_its_rank(db, tmp_path):
    database, run_id = db
    process = task(tmp_path)
    running(database, run_id)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not database.query(part_ranks.ranks, run_id)[0].live


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--rank", "1"), "engine-0 has 1 processes, numbered from 0"), (("--part", "engine-9"), "no part 'engine-9'")],
)
def test_an_unknown_process_is_refused(db, tmp_path, args, said):
    process = task(tmp_path, *args)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in output


def test_a_host_with_another_folder_gives_the_part_up(db, tmp_path, monkeypatch):
    database, run_id = db
    token = add_token(tmp_path)
    spec = PartSpec(name="engine-0", argv=("{python}", "-c", SLEEP), folder_token=token)
    database.transact(part_ranks.declare, run_id, {"engine-0": spec.model_dump(mode="json")})
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "config.yaml", tmp_path / "elsewhere")
    write_secrets(tmp_path / "elsewhere", {DATABASE_URL: database.url})
    monkeypatch.setattr(folder_proof, "SEEN_AFTER_S", 0.0)
    done = CliRunner().invoke(app, ["task", "--folder", f"{tmp_path}/elsewhere", "--part", "engine-0"])
    assert done.exit_code == 0, done.output  # the scheduler starts it no more
    failure = database.query(part_ranks.failures, run_id)["engine-0"]
    assert failure.startswith(f"host {socket.gethostname()} has another folder at {tmp_path}/elsewhere")
    assert database.query(part_ranks.ranks, run_id) == []


def test_a_host_with_the_supervisors_folder_starts_the_command(db, tmp_path):
    database, run_id = db
    spec = PartSpec(name="engine-0", argv=("{python}", "-c", SLEEP), folder_token=add_token(tmp_path))
    database.transact(part_ranks.declare, run_id, {"engine-0": spec.model_dump(mode="json")})
    process = task(tmp_path)
    running(database, run_id)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
