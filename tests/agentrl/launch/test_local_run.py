"""What cannot work is said in one line before anything starts."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from databases import Databases
from sqlalchemy import Executable, NullPool, create_engine, insert, make_url, select, text, update
from sqlalchemy.exc import OperationalError, ProgrammingError

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.engine.engine_keys import EngineKeys
from agentrl.environment import (
    ADMIN_KEY,
    DATABASE_URL,
    ENGINE_KEY,
    ENGINE_KEYS,
    RUN_KEY,
    SECRETS,
    STORAGE,
    storage_variables,
)
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.launch import part_process, parts
from agentrl.launch.local_run import train
from agentrl.launch.part_process import Part
from agentrl.launch.parts import Plan
from agentrl.launch.run_lifecycle import open_run
from agentrl.placement import memory_share
from agentrl.placement.hosts import Host
from agentrl.store import Database, runs
from agentrl.store.db.codec import hash_key
from agentrl.store.tables import engines
from agentrl.store.tables import runs as runs_table

BASE: dict[str, Any] = {
    "name": "r",
    "agent": "agentrl.agents.reverse:ReverseAgent",
    "tasks": "agentrl.agents.reverse:train_tasks",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def config(tmp_path: Path, model: object, **changes: Any) -> RunConfig:
    return parse_config(BASE | {"runs_dir": str(tmp_path / "runs"), "model": str(model)} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "smolm2"}, "no model 'smolm2'; did you mean 'smollm2'"),
        ({"model": "/no/such/folder"}, "model folder /no/such/folder does not exist"),
        ({"agent": "agentrl.agents.reverse:Nobody"}, "agent: 'agentrl.agents.reverse' has no 'Nobody'"),
        ({"tasks": "missing.jsonl"}, "tasks: cannot read missing.jsonl"),
        ({"evaluation": {"tasks": "agentrl.agents.reverse:heldout_task"}}, "did you mean 'heldout_tasks'"),
        ({"database_url": "mysql://x"}, "only sqlite and postgresql"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, model: Path, changes: dict[str, Any], message: str) -> None:
    run = config(tmp_path, changes.get("model", model), **{k: v for k, v in changes.items() if k != "model"})
    with pytest.raises(UserError, match=message) as caught:
        train(run, Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_refused(tmp_path: Path, model: Path, taken_port: int) -> None:
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{taken_port}: Address already in use"):
        train(config(tmp_path, model, proxy={"port": taken_port}), Console(file=io.StringIO()))


def test_ports_are_distinct_and_none_is_opened_for_engines_that_already_run(tmp_path: Path, model: Path) -> None:
    proxy, engines = parts.choose_ports(config(tmp_path, model, resources={"engines": {"count": 3}}))
    assert len({proxy, *engines}) == 4
    assert parts.choose_ports(config(tmp_path, model, engine={"urls": ["http://e"]}))[1] == ()


@pytest.mark.parametrize(
    ("lora", "room"), [({}, []), ({"rank": 8}, []), ({"rank": 8, "publish": "adapter", "targets": ["o_proj"]}, ["8"])]
)
def test_engines_have_room_for_the_adapters_that_they_will_be_sent(
    tmp_path: Path, model: Path, lora: dict[str, Any], room: list[str]
) -> None:
    plan = Plan(
        config=config(tmp_path, model, trainer={"lora": lora}),
        model=model,
        database_url="sqlite://",
        admin_key="a",
        run_key="r",
        proxy_port=1,
        engine_ports=(2,),
    )
    (engine,) = parts.engines(plan)
    assert [rank for option, rank in pairwise(engine.argv) if option == "--max-lora-rank"] == room


def test_the_runs_seed_seeds_each_engine_with_another(tmp_path: Path, model: Path) -> None:
    def seeds(seed: int) -> list[int]:
        plan = Plan(
            config=config(tmp_path, model, seed=seed),
            model=model,
            database_url="sqlite://",
            admin_key="a",
            run_key="r",
            proxy_port=1,
            engine_ports=(2, 3),
        )
        return [int(engine.argv[engine.argv.index("--random-seed") + 1]) for engine in parts.engines(plan)]

    assert seeds(5) == seeds(5)
    assert len({*seeds(-1), *seeds(0), *seeds(5)}) == 6
    assert all(0 <= seed < 2**31 for seed in seeds(-1))


def test_only_a_run_that_is_told_to_may_start_over_without_its_checkpoints(tmp_path: Path, model: Path) -> None:
    def trainer(**flags: bool) -> list[str]:
        plan = Plan(
            config=config(tmp_path, model),
            model=model,
            database_url="sqlite://",
            admin_key="a",
            run_key="r",
            proxy_port=1,
            engine_ports=(2,),
            **flags,
        )
        return parts.trainer(plan, lambda: True).argv

    assert trainer(from_base=True) == [*trainer(), "--from-base"]


def test_each_rollout_worker_has_a_name_and_an_owner_of_its_own(tmp_path: Path, model: Path) -> None:
    settings = {"model": model, "database_url": "x", "admin_key": "x", "run_key": "x", "proxy_port": 1}
    run = config(tmp_path, model, resources={"rollout_workers": 2})
    workers = parts.rollouts(Plan(config=run, engine_ports=(), **settings), lambda: True)
    assert [(part.name, part.argv[-1]) for part in workers] == [("rollout-0", "local-0"), ("rollout-1", "local-1")]


@pytest.mark.parametrize("storage", [{}, {"url": "s3://b/r"}, {"url": "s3://b/r", "weights": True}])
def test_each_part_is_told_only_the_secrets_that_it_needs(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, storage: dict[str, Any]
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "ours")
    for name in storage_variables(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "storage")
    plan = Plan(
        config=config(tmp_path, model, engine={"device": "cpu"}, storage=storage),
        model=model,
        database_url="sqlite:///told",
        admin_key="told",
        run_key="told",
        proxy_port=1,
        engine_ports=(2,),
        engine_keys=EngineKeys(by_url={parts.engine_url(2): "arl-engine-x"}),
    )

    def told(part: Part) -> set[str]:
        env = part_process.for_child(os.environ) | part.env
        assert "ours" not in env.values()
        return env.keys() & (SECRETS | STORAGE)

    bucket = {"AWS_ACCESS_KEY_ID"}
    assert told(parts.proxy(plan)) == {ADMIN_KEY, DATABASE_URL, ENGINE_KEYS}
    assert told(parts.trainer(plan, lambda: True)) == {ADMIN_KEY, DATABASE_URL} | (bucket if storage else set())
    (worker,) = parts.rollouts(plan, lambda: True)
    assert told(worker) == {RUN_KEY}
    assert told(parts.engines(plan)[0]) == {ENGINE_KEY} | (bucket if storage.get("weights") else set())
    assert not any("arl-engine-x" in word for part in (parts.proxy(plan), *parts.engines(plan)) for word in part.argv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": None, "tasks": None}, "needs agent and tasks in the config"),
        ({"tasks": None}, "needs tasks in the config"),
        ({"steps": 0}, "steps: 0 trains nothing"),
    ],
)
def test_a_run_that_only_records_is_not_trained(
    tmp_path: Path, model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path, model, **changes), Console(file=io.StringIO()))


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


def test_checkpoints_of_a_run_that_the_database_does_not_know_are_not_started_over(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model, database_url=f"sqlite:///{tmp_path}/emptied.db")
    checkpoint = run.run_dir / "checkpoints" / "step-000003-0123456789abcdef"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").touch()
    with pytest.raises(UserError, match=r"r has checkpoints, but sqlite:.*emptied.db has no run 'r': ") as caught:
        train(run, Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)
    database = Database(str(run.database_url))
    with database.read() as conn:
        assert runs.all_runs(conn) == []
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


def test_each_process_sees_its_gpus_and_gets_its_sizes(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model, resources="sglang:d2t2+fsdp:d4", engine={"device": "cuda", "quantization": "fp8"})
    plan = Plan(
        config=run,
        model=model,
        database_url="sqlite://",
        admin_key="a",
        run_key="r",
        proxy_port=1,
        engine_ports=(2, 3),
        assignment=parts.assign_to(run, (Host("h", tuple("abcdefgh")),), gpus=True),
    )
    first, second = parts.engines(plan)
    assert [part.env["CUDA_VISIBLE_DEVICES"] for part in (first, second)] == ["e,f", "g,h"]
    assert parts.trainer(plan, bool).env["CUDA_VISIBLE_DEVICES"] == "a,b,c,d"
    assert {("--tp-size", "2"), ("--quantization", "fp8")} <= set(pairwise(first.argv))
    assert not {"--max-total-tokens", "--mem-fraction-static", "--pp-size"} & set(first.argv)


def shared_plan(run: RunConfig, model: Path) -> Plan:
    """Engine and trainer on one GPU."""
    return Plan(
        config=run,
        model=model,
        database_url="sqlite://",
        admin_key="a",
        run_key="r",
        proxy_port=1,
        engine_ports=(2,),
        assignment=parts.assign_to(run, (Host("h", ("0",)),), gpus=True),
    )


def test_parts_on_one_gpu_take_turns(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer keeps little memory while idle, and gets the settings that only the plan decided."""
    monkeypatch.setattr(memory_share, "gpu_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr(memory_share, "parameters", lambda _: 10**9)
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda"}), model)
    engine = parts.engines(plan)[0].argv
    assert "--enable-memory-saver" in engine
    assert ("--mem-fraction-static", "0.68") in set(pairwise(engine))
    assert parts.trainer(plan, bool).argv[-1] == "resources.colocated=true"
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda", "memory_fraction": 0.7}), model)
    assert ("--mem-fraction-static", "0.7") in set(pairwise(parts.engines(plan)[0].argv))
    assert "take turns" in parts.sharing_lines(plan.config, plan.assignment)[0]


def test_parts_on_one_gpu_may_divide_its_memory(tmp_path: Path, model: Path) -> None:
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda"}, resources={"divide_memory": True}), model)
    engine = parts.engines(plan)[0].argv
    assert "--enable-memory-saver" not in engine
    assert ("--mem-fraction-static", str(parts.DIVIDED_FRACTION)) in set(pairwise(engine))
    assert "resources.colocated=true" not in parts.trainer(plan, bool).argv
    assert parts.sharing_lines(plan.config, plan.assignment) == [
        "engines and trainer divide the memory of the same GPUs: engines have 0.4 of it"
    ]


def test_parts_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model, engine={"device": "cuda"}, trainer={"device": "cuda"})
    with pytest.raises(UserError, match=r"resources need 2 GPUs .*, but this host has none"):
        train(run, Console(file=io.StringIO()))
    assert not run.run_dir.exists()
