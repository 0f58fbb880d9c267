"""`agentrl trainer` with several ranks becomes torchrun, with this host's share of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.store import Database

ONE_HOST: dict[str, Any] = {"resources": {"trainer": {"ranks": 4}}}
TWO_HOSTS: dict[str, Any] = {"placement": "ray", "resources": {"trainer": {"ranks": 4, "hosts": 2}}}


class Became(Exception):
    """The process would have become another program."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run that is in a store."""
    url = f"sqlite:///{tmp_path}/store.db"
    database = Database(url)
    database.upgrade()
    with database.write() as conn:
        create_run(conn)
    database.close()
    for name, value in (("PROXY_URL", "http://proxy"), ("ADMIN_KEY", "key"), ("DATABASE_URL", url)):
        monkeypatch.setenv(f"AGENTRL_{name}", value)
    monkeypatch.delenv("RANK", raising=False)

    def become(program: str, arguments: list[str]) -> None:
        assert program == arguments[0] == sys.executable
        raise Became(*arguments[1:])

    monkeypatch.setattr(os, "execv", become)
    return tmp_path / "run.yaml"


def trainer(config: Path, settings: dict[str, Any], *arguments: str) -> list[str]:
    """The arguments of the program that the command becomes."""
    run = {"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t", "runs_dir": str(config.parent)}
    config.write_text(yaml.safe_dump(run | settings))
    with pytest.raises(Became) as became:
        CliRunner().invoke(app, ["trainer", "--config", str(config), *arguments], catch_exceptions=False)
    return list(map(str, became.value.args))


def test_the_ranks_of_one_host_meet_there(config: Path) -> None:
    assert trainer(config, ONE_HOST, "steps=3", "--from-base") == [
        *("-m", "agentrl.trainer.torchrun", "--nproc-per-node=4", "--standalone"),
        *("-m", "agentrl", "trainer", "--config", str(config), "steps=3", "--from-base"),
    ]


def test_each_of_several_hosts_starts_its_share_and_meets_the_others_at_host_0(config: Path) -> None:
    assert trainer(config, TWO_HOSTS, "--host-rank", "1", "--leader", "[fd00::1]:2950") == [
        *("-m", "agentrl.trainer.torchrun", "--nproc-per-node=2", "--nnodes=2", "--node-rank=1"),
        *("--master-addr=[fd00::1]", "--master-port=2950", "--max-restarts=0"),
        *("-m", "agentrl", "trainer", "--config", str(config)),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host-rank", "2", "--leader", "h:1"), r"--host-rank 2: resources\.trainer\.hosts is 2, numbered from 0"),
        (("--host-rank", "1"), r"resources\.trainer\.hosts is 2: give --leader HOST:PORT, the same on every host"),
        (("--leader", "h"), "give --leader HOST:PORT"),
        (("--leader", ":1"), "give --leader HOST:PORT"),
        (("--leader", "h:"), "give --leader HOST:PORT"),
        (("--leader", "h:port"), "give --leader HOST:PORT"),
    ],
)
def test_a_host_that_cannot_join_the_others_is_refused(config: Path, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(config, TWO_HOSTS, *arguments)


def test_host_0_looks_for_the_run_before_any_rank_starts(config: Path) -> None:
    with pytest.raises(UserError, match="other"):
        trainer(config, ONE_HOST | {"name": "other"})


@pytest.mark.parametrize("name", ["AGENTRL_PROXY_URL", "AGENTRL_ADMIN_KEY"])
def test_a_trainer_without_a_proxy_or_its_key_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(AgentRLError, match=f"{name} is not set: the trainer publishes weights through the proxy"):
        trainer(config, ONE_HOST)
