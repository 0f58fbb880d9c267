"""What cannot work is said in one line before anything starts."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.console import Console
from agentrl.errors import ConfigError, UserError
from agentrl.launch.local_run import train
from agentrl.store import Database, runs

from .local_config import config


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "smolm2"}, "no model 'smolm2'; did you mean 'smollm2'"),
        ({"model": "/no/such/folder"}, "model folder /no/such/folder does not exist"),
        ({"agent": "agentrl.agents.reverse:Nobody"}, "agent: 'agentrl.agents.reverse' has no 'Nobody'"),
        ({"tasks": "missing.jsonl"}, "tasks: cannot read missing.jsonl"),
        ({"evaluation": {"tasks": "agentrl.agents.reverse:heldout_task"}}, "did you mean 'heldout_tasks'"),
        ({"reward": {"function": "reward_model", "args": {"model": "/no/model"}}}, "model folder /no/model does not"),
        ({"reward": {"function": "reward_model"}}, "give either `url`, the address of a scorer, or `model`"),
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


def test_parts_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model, engine={"device": "cuda"}, trainer={"device": "cuda"})
    with pytest.raises(UserError, match=r"resources need 2 GPUs .*, but this host has none"):
        train(run, Console(file=io.StringIO()))
    assert not run.run_dir.exists()
