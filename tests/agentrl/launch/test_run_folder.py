"""One supervisor per folder; a resumed run computes what it computed before."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.config_files import load_config, parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError, UserError
from agentrl.launch import run_folder

BASE: dict[str, Any] = {"name": "r", "model": "tiny", "agent": "a:A", "tasks": "a:t", "steps": 4}


def config(**changes: Any) -> RunConfig:
    return parse_config(BASE | changes)


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    with (
        run_folder.locked(tmp_path / "r"),
        pytest.raises(UserError, match="is in use by process"),
        run_folder.locked(tmp_path / "r"),
    ):
        pass
    with run_folder.locked(tmp_path / "r"):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 9},
        {"resources": {"engines": {"count": 2}}},
        {"proxy": {"port": 9}},
        {"trainer": {"checkpoint_every": 2}},
    ],
)
def test_a_resume_may_change_how_a_run_is_carried_out(changes: dict[str, Any]) -> None:
    run_folder.check_resume(config().model_dump(mode="json"), config(**changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed=0, not 1"),
        ({"trainer": {"lr": 1e-3}}, "trainer.lr=5e-05, not 0.001"),
        ({"agent_args": {"turns": 2}}, "agent_args"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature=null, not 0.5"),
        ({"steps": 3}, "started with 4; they may only grow"),
    ],
)
def test_a_resume_may_not_change_what_a_run_computes(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        run_folder.check_resume(config().model_dump(mode="json"), config(**changes))


def test_the_written_config_is_the_whole_config(tmp_path: Path) -> None:
    run = config(runs_dir=str(tmp_path), trainer={"lr": 2e-4})
    run_folder.write_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run


def test_the_database_does_not_hold_its_own_password_and_the_written_config_is_its_owners(tmp_path: Path) -> None:
    run = config(runs_dir=str(tmp_path), database_url="postgresql://me:secret@db/runs")
    assert run_folder.stored(run) == run.model_dump(mode="json") | {"database_url": "postgresql://me:***@db/runs"}
    run_folder.check_resume(run_folder.stored(run), run)
    (tmp_path / "config.yaml").touch(mode=0o644)
    run_folder.write_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600


def test_the_database_is_the_configs_the_environments_or_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    assert run_folder.database_url(config(runs_dir=str(tmp_path))) == f"sqlite:///{tmp_path}/r/agentrl.db"
    (tmp_path / "r").mkdir()
    run_folder.remember_database(tmp_path / "r", "postgresql://me@db/runs")
    assert run_folder.database_url(config(runs_dir=str(tmp_path))) == "postgresql://me@db/runs"
    monkeypatch.setenv("AGENTRL_DATABASE_URL", "sqlite:///env.db")
    assert run_folder.database_url(config()) == "sqlite:///env.db"
    assert run_folder.database_url(config(database_url="sqlite:///own.db")) == "sqlite:///own.db"


def test_a_new_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with run_folder.locked(tmp_path / "runs" / "r"):
        assert stat.S_IMODE((tmp_path / "runs" / "r").stat().st_mode) == 0o700
