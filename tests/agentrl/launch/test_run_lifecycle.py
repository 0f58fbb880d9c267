"""A run is created, supervised, failed and continued."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from databases import Databases
from sqlalchemy import Executable, NullPool, create_engine, insert, make_url, select, text, update
from sqlalchemy.exc import OperationalError, ProgrammingError

from agentrl.console import Console
from agentrl.errors import AgentRLError, ModelFolderError, UserError
from agentrl.launch import parts
from agentrl.launch.local_run import train
from agentrl.launch.part_process import Part
from agentrl.launch.parts import Plan
from agentrl.launch.run_lifecycle import open_run
from agentrl.store import Database, runs
from agentrl.store.db.codec import hash_key
from agentrl.store.tables import engines
from agentrl.store.tables import runs as runs_table

from .local_config import config


def test_a_run_is_created_once_and_reopened_without_the_engines_of_the_last_time(tmp_path: Path, model: Path) -> None:
    def plan(**changes: Any) -> Plan:
        run = config(tmp_path, model, steps=3, **changes)
        return Plan(
            config=run, model=model, database_url=url, admin_key="a", run_key="r", proxy_port=1, engine_ports=(2,)
        )

    url = f"sqlite:///{tmp_path}/agentrl.db"
    database = Database(url)
    database.upgrade()

    def opened(plan: Plan) -> tuple[str, str]:
        return open_run(database, plan.config, plan.model, plan.run_key)

    run_id, status = opened(plan())
    assert status == "running"
    with database.write() as conn:
        conn.execute(insert(engines).values(run_id=run_id, url="http://gone", state="serving", last_seen_at=0.0))
        runs.set_status(conn, run_id, "paused")
    assert opened(plan()) == (run_id, "running")
    with database.read() as conn:
        assert conn.execute(select(engines)).all() == []
    with pytest.raises(UserError, match="seed=0, not 5"):
        opened(plan(seed=5))
    assert opened(plan(max_restarts=50)) == (run_id, "running")
    database.close()


class Stage:
    """Parts that only wait for a file, and a thread that plays the proxy and the database's administrator."""

    def __init__(self, folder: Path, url: str, out: io.StringIO) -> None:
        self.url, self.out, self.end = url, out, folder / "end"
        self.folder = folder
        self.env = ""  # what other programs could source while the run was on

    def part(self, name: str) -> Part:
        code = f"import os, time\nwhile not os.path.exists({str(self.end)!r}): time.sleep(0.02)"
        return Part(
            name=name, argv=[sys.executable, "-c", code], log_file=self.folder / f"{name}.log", done=self.end.exists
        )

    def play(self) -> None:
        """The database is away when the trainer dies, and comes back."""
        try:
            wait_until(lambda: self.rows("SELECT id FROM runs"))
            run_id = self.rows("SELECT id FROM runs")[0].id
            self.write(insert(engines).values(run_id=run_id, url="http://e", state="serving", last_seen_at=0.0))
            wait_until(lambda: len(self.rows("SELECT id FROM events WHERE kind = 'part_started'")) == 3)
            started = self.rows("SELECT data FROM events WHERE kind = 'part_started'")
            (trainer,) = [row.data["pid"] for row in started if row.data["part"] == "trainer"]
            self.set_away(True)
            for process in psutil.Process(trainer).children():
                process.kill()
            wait_until(lambda: "trainer ended with status" in self.out.getvalue())
            self.set_away(False)
            self.env = (self.folder / "runs" / "r" / "env").read_text()
            wait_until(lambda: len(self.rows("SELECT id FROM events WHERE kind = 'part_started'")) == 4)
            self.write(update(runs_table).values(published_step=1))
        finally:
            self.end.touch()

    def rows(self, sql: str) -> list[Any]:
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as conn:
            try:
                return list(conn.execute(text(sql)))
            except (OperationalError, ProgrammingError):  # no table yet
                return []

    def write(self, statement: Executable) -> None:
        with create_engine(self.url, poolclass=NullPool).begin() as conn:
            conn.execute(statement)

    def set_away(self, away: bool) -> None:
        """Cut every connection and refuse new ones, as a server that restarts does; or let them in again."""
        url = make_url(self.url)
        admin = create_engine(url.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with admin.connect() as conn:
            conn.execute(text(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS {not away}'))
            if away:
                conn.execute(
                    text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
                    {"name": url.database},
                )


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.02)


def test_the_supervisor_outlives_a_database_that_is_away(
    tmp_path: Path, model: Path, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    with databases.lent("postgresql") as url:
        stage = Stage(tmp_path, url, out)
        monkeypatch.setenv("AGENTRL_RUN_KEY", "my-run-key")
        monkeypatch.setattr(parts, "engines", lambda plan: [])
        monkeypatch.setattr(parts, "proxy", lambda plan: stage.part("proxy"))
        monkeypatch.setattr(parts, "trainer", lambda plan, finished: stage.part("trainer"))
        monkeypatch.setattr(parts, "rollouts", lambda plan, finished: [stage.part("rollout")])
        with ThreadPoolExecutor() as pool:
            playing = pool.submit(stage.play)
            summary = train(config(tmp_path, model, steps=1, database_url=url), Console(file=out))
            playing.result()
        assert summary["steps"] == 1
        (url_line, key_line) = stage.env.splitlines()
        address = url_line.removeprefix("export AGENTRL_PROXY_URL=")
        assert f"proxy: {address}; other programs: . {tmp_path}/runs/r/env\n" in out.getvalue()
        assert key_line == "export AGENTRL_RUN_KEY=my-run-key"
        assert "my-run-key" not in out.getvalue()
        assert not (tmp_path / "runs" / "r" / "env").exists()
        assert [row.key_hash for row in stage.rows("SELECT key_hash FROM runs")] == [hash_key("my-run-key")]
        (died,) = stage.rows("SELECT data FROM events WHERE kind = 'part_died'")
        assert died.data == {"part": "trainer", "status": 128 + signal.SIGKILL}
        assert [row.status for row in stage.rows("SELECT status FROM runs")] == ["finished"]


def test_a_teacher_with_other_tokens_is_refused_before_anything_starts(tmp_path: Path) -> None:
    taught = {"teacher": "smollm2", "algorithm": {"distill_coef": 1.0}}
    run = config(tmp_path, "tiny", trainer=taught)
    with pytest.raises(ModelFolderError, match=r"trainer\.teacher: .*smollm2 has another tokenizer than .*tiny"):
        train(run, Console(file=io.StringIO()))
    assert not [*run.run_dir.glob("*.db")]


def test_a_run_that_fails_ends_with_the_reason_and_the_same_command_lets_it_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions all fail, as the store finds; here the parts do not end by themselves."""
    out, url = io.StringIO(), f"sqlite:///{tmp_path}/r.db"
    stage, run = Stage(tmp_path, url, out), config(tmp_path, model, steps=1, database_url=url)
    monkeypatch.setattr(parts, "engines", lambda plan: [])
    for name in ("proxy", "trainer"):
        monkeypatch.setattr(parts, name, lambda plan, finished=None, name=name: stage.part(name))
    monkeypatch.setattr(parts, "rollouts", lambda plan, finished: [stage.part("rollout")])

    def start(parts_before: int) -> None:
        wait_until(lambda: (tmp_path / "r.db").exists())  # whoever connects makes it
        wait_until(lambda: len(stage.rows("SELECT id FROM events WHERE kind = 'part_started'")) > parts_before)
        (row,) = stage.rows("SELECT id FROM runs WHERE status = 'running' AND error IS NULL")
        stage.write(insert(engines).values(run_id=row.id, url="http://e", state="serving", last_seen_at=0.0))
        wait_until(lambda: len(stage.rows("SELECT id FROM events WHERE kind = 'part_started'")) == parts_before + 3)

    def fail() -> None:
        start(0)
        stage.write(update(runs_table).values(status="failed", error="9 sessions in a row failed"))

    with ThreadPoolExecutor() as pool:
        playing = pool.submit(fail)
        with pytest.raises(AgentRLError, match="run r failed: 9 sessions in a row failed"):
            train(run, Console(file=out))
        playing.result()
    (row,) = stage.rows("SELECT status, error FROM runs")
    assert tuple(row) == ("failed", "9 sessions in a row failed")

    def end() -> None:
        start(3)
        stage.write(update(runs_table).values(published_step=1))
        stage.end.touch()

    with ThreadPoolExecutor() as pool:
        playing = pool.submit(end)
        train(run, Console(file=out))
        playing.result()
    assert [row.status for row in stage.rows("SELECT status FROM runs")] == ["finished"]
