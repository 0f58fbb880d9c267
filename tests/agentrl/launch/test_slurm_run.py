"""A run in a Slurm job, from its login node: what is written, what is submitted, and what is refused.

Slurm's commands are small scripts here: `queue` holds squeue's answers, a line each,
`submitted` what sbatch was called with.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.publish_config import StorageConfig
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.environment import DATABASE_URL, RUN_KEY
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launch import run_folder, run_lifecycle, slurm_run
from agentrl.launch.placed_run import secrets_of
from agentrl.launch.slurm_run import train
from agentrl.placement.run_secrets import adopt_storage

COMMANDS = {
    "squeue": "head -n 1 queue; sed -i 1d queue",
    "sbatch": 'echo "$@" >>submitted; echo 7',
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run's configuration, in a folder where Slurm's commands are, with an empty queue."""
    for name, script in COMMANDS.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\ncd '{tmp_path}' && {script}\n")
        file.chmod(0o755)
    (tmp_path / "queue").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    data = {
        "name": "r",
        "model": "tiny",
        "agent": "agentrl.agents.reverse:ReverseAgent",
        "tasks": "agentrl.agents.reverse:train_tasks",
        "placement": "slurm",
        "runs_dir": str(tmp_path / "runs"),
    }
    return parse_config(data)


def run(config: RunConfig) -> str:
    """What `agentrl train` prints until the job has ended, which here ends before the run."""
    out = io.StringIO()
    with pytest.raises(AgentRLError, match=r"^the Slurm job has ended before the run: it never started "):
        train(config, Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_hosts_cannot_share_a_sqlite_file(config, empty_database_url, monkeypatch):
    monkeypatch.setenv(DATABASE_URL, empty_database_url)
    with pytest.raises(ConfigError, match=r"^placement: slurm needs PostgreSQL"):
        train(config, Console(file=io.StringIO()))
    assert not Path("submitted").exists()


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_the_job_is_submitted_with_all_that_it_reads_in_the_folder(config, empty_database_url, monkeypatch):
    monkeypatch.setenv(DATABASE_URL, empty_database_url)
    run(config)
    script = config.run_dir / "slurm.sh"
    assert Path("submitted").read_text().splitlines() == ["--test-only", f"--parsable --export=NIL {script}"]
    assert f"train {config.run_dir}/config.yaml" in script.read_text()
    secrets = json.loads((config.run_dir / ".secrets").read_text())
    assert secrets[DATABASE_URL] == empty_database_url
    assert secrets[RUN_KEY] not in script.read_text()
    monkeypatch.delenv(DATABASE_URL)  # as in the job
    assert run_folder.database_url(config) == empty_database_url


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_the_access_to_the_storage_is_in_the_private_file_alone(config, empty_database_url, monkeypatch):
    monkeypatch.setattr(run_lifecycle, "probe", lambda store: None)
    (Path("sbatch")).write_text(Path("sbatch").read_text() + "env >>environment\n")
    monkeypatch.setenv(DATABASE_URL, empty_database_url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    stored = config.model_copy(update={"storage": StorageConfig(url="s3://bucket/r")})
    run(stored)
    file = config.run_dir / ".secrets"
    assert json.loads(file.read_text())["AWS_SECRET_ACCESS_KEY"] == "s3cret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in Path("environment").read_text() + (config.run_dir / "slurm.sh").read_text()
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)  # as in the job
    adopt_storage(config.run_dir)
    assert secrets_of(stored, empty_database_url) == json.loads(file.read_text())
    assert "AWS_ACCESS_KEY_ID" not in secrets_of(config, empty_database_url)


@pytest.fixture
def waiting(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the job wait in the queue, until it is asked for a fourth time."""
    monkeypatch.setattr(slurm_run, "ASK_S", 0.0)
    monkeypatch.setattr(slurm_run, "POLL_S", 0.0)

    def wait() -> None:
        Path("queue").write_text("7|PENDING|Resources\n" * 3)

    return wait


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_the_same_command_follows_the_job_that_is_there(config, empty_database_url, monkeypatch, waiting):
    monkeypatch.setenv(DATABASE_URL, empty_database_url)
    run(config)
    waiting()
    assert "Slurm job 7 is pending (Resources)" in run(config)
    assert len(Path("submitted").read_text().splitlines()) == 2


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_a_job_with_another_configuration_is_not_followed(config, empty_database_url, monkeypatch, waiting):
    monkeypatch.setenv(DATABASE_URL, empty_database_url)
    run(config)
    waiting()
    with pytest.raises(ConfigError, match=r"^Slurm job 7 runs r with another configuration: end it first$"):
        train(config.model_copy(update={"steps": 99}), Console(file=io.StringIO()))
