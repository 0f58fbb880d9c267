"""Every command finds a run by its name or folder, after `agentrl run create` alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.configs.config_files import parse_config
from agentrl.store import Database, runs
from agentrl.store.sessions import group_starts, session_limits


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs `first` and `second`, made in this order."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AGENTRL_") and name != "AGENTRL_CACHE"]:
        monkeypatch.delenv(name)
    for number, name in enumerate(("first", "second")):
        made = call("run", "create", "--name", name, "--model", str(tiny_model))
        assert made.exit_code == 0, made.output
        os.utime(tmp_path / "runs" / name / "config.yaml", (number, number))
    return tmp_path


def call(*args: str) -> Any:
    return CliRunner().invoke(app, args)


@pytest.mark.parametrize("run", ["first", "runs/first"])
def test_every_command_finds_a_run(here: Path, run: str) -> None:
    status = json.loads(call("status", "--run", run, "--json").stdout)
    assert status["run"]["name"] == "first"
    for args, said in [
        (("store", "check", "--run", run), "0 violations"),
        (("store", "backup", "copy.db", "--run", run), "bytes in copy.db"),
        (("store", "prune", "--run", run, "--older-than", "1d"), "removed"),
        (("db", "upgrade", "--run", run), f"{here}/runs/first/agentrl.db is at the newest revision"),
        (("export", "--run", run, "--out", "out", "--format", "jsonl"), "0 trajectories"),
        (("key", "list", "--run", run), "["),
        (("run", "reopen", run), "run first admits groups again"),
    ]:
        done = call(*args)
        assert (done.exit_code, said in done.output) == (0, True), (args, done.output, done.exception)
    assert "run 'first' has completed no step yet" in str(call("replay", "--run", run, "--steps", "1").exception)
    assert "no session 'x'" in str(call("doctor", "--session", "x", "--run", run).exception)
    reward = ("store", "reward", "--session", "x", "--value", "1", "--run", run)
    assert "no session 'x'" in str(call(*reward).exception)


def test_without_options_the_newest_run_is_shown_and_named(here: Path) -> None:
    done = call("status", "--json")
    assert json.loads(done.stdout)["run"]["name"] == "second"
    assert done.stderr == "run second, in runs/second: the newest of 2; --run names another\n"


def test_run_list_shows_the_runs_of_every_folder(here: Path) -> None:
    listed = call("run", "list").stdout
    assert listed.index("second") < listed.index("first")


def test_a_variable_of_another_run_is_named_in_the_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DATABASE_URL", f"sqlite:///{here}/runs/second/agentrl.db")
    refused = call("export", "--run", "first", "--out", "out")
    assert str(refused.exception) == (
        "AGENTRL_DATABASE_URL names a database without run 'first', which is in runs/first: "
        "unset the variable, or give --run runs/first"
    )
    assert json.loads(call("status", "--run", "runs/first", "--json").stdout)["run"]["name"] == "first"


def test_a_proxys_address_in_the_environment_does_not_hide_a_run_that_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_PROXY_URL", "http://127.0.0.1:9")
    assert json.loads(call("status", "--run", "first", "--json").stdout)["run"]["name"] == "first"


def test_a_session_is_rewarded_without_naming_its_database(here: Path) -> None:
    database = Database(f"sqlite:///{here}/runs/second/agentrl.db")
    with database.write() as conn:
        run = runs.by_name(conn, "second")
        limits = session_limits.Limits.of(parse_config(run.config))
        (session_id,) = group_starts.start_external(conn, run.id, limits, ["hash"], {}, {}).session_ids
    database.close()
    done = call("store", "reward", "--session", session_id, "--value", "1")
    assert json.loads(done.stdout)["applied"] is True, done.exception


def test_a_worker_finds_the_proxy_of_a_running_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "agentrl.rollout.worker.run_worker", lambda config, **given: asked.update(given, of=config.name)
    )
    (here / "runs" / "first" / "env").write_text("export AGENTRL_PROXY_URL=http://h:1\nexport AGENTRL_RUN_KEY='a b'\n")
    assert call("rollout", "--run", "first", "--owner", "me").exit_code == 0
    assert asked == {"base_url": "http://h:1", "api_key": "a b", "owner": "me", "of": "first"}
    assert "give --config FILE, or --run NAME" in str(call("rollout").exception)
