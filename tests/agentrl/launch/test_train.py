"""What cannot work is said in one line before anything starts."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import insert, select

from agentrl.config import RunConfig, parse_config
from agentrl.errors import UserError
from agentrl.launch import parts
from agentrl.launch.parts import Plan
from agentrl.launch.train import open_run, train
from agentrl.store import Database, runs
from agentrl.tables import engines

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
    proxy, engines = parts.choose_ports(config(tmp_path, model, engine={"count": 3}))
    assert len({proxy, *engines}) == 4
    assert parts.choose_ports(config(tmp_path, model, engine={"urls": ["http://e"]}))[1] == ()


def test_a_run_is_created_once_and_reopened_without_the_engines_of_the_last_time(tmp_path: Path, model: Path) -> None:
    def plan(**changes: Any) -> Plan:
        run = config(tmp_path, model, steps=3, **changes)
        return Plan(
            config=run, model=model, database_url=url, admin_key="a", run_key="r", proxy_port=1, engine_ports=(2,)
        )

    url = f"sqlite:///{tmp_path}/agentrl.db"
    database = Database(url)
    database.upgrade()
    run_id, status = open_run(database, plan())
    assert status == "running"
    with database.write() as conn:
        conn.execute(insert(engines).values(run_id=run_id, url="http://gone", state="serving", last_seen_at=0.0))
        runs.set_status(conn, run_id, "paused")
    assert open_run(database, plan()) == (run_id, "running")
    with database.read() as conn:
        assert conn.execute(select(engines)).all() == []
    with pytest.raises(UserError, match="seed=0, not 5"):
        open_run(database, plan(seed=5))
    database.close()
