"""A worker does whatever a run still needs: evaluation, rollouts, evaluation."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.worker import work

AGENT = """
class Agent:
    async def run(self, data, **extra):
        return float(extra["is_eval"])

def tasks():
    return [{"n": n} for n in range(9)]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "little_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    return parse_config(
        {
            "name": "r",
            "model": "tiny",
            "agent": "little_agent:Agent",
            "tasks": "little_agent:tasks",
            "evaluation": {"tasks": "little_agent:tasks", "unseen_tasks": "little_agent:tasks", "size": 2},
        }
    )


async def run(config: RunConfig, proxy: Any) -> None:
    await work(
        config, settings_of(config), base_url=proxy.url, api_key="k", owner="me", console=Console(file=io.StringIO())
    )


def played(proxy: Any) -> Counter[tuple[Any, ...]]:
    labels = [s["metadata"].get("evaluation", {}) for s in proxy.sessions.values()]
    return Counter((label.get("step"), label.get("setting")) for label in labels)


async def test_a_fresh_run_is_evaluated_played_and_evaluated(config: RunConfig, proxy: Any) -> None:
    await run(config, proxy)
    settings = {(step, name): 2 for step in (0, 1) for name in ("sampled", "greedy", "unseen")}
    assert played(proxy) == settings | {(None, None): proxy.size * 2}
    assert {s["status"] for s in proxy.sessions.values()} == {"completed"}
    (abandoner,) = proxy.abandoned
    assert abandoner.startswith("me/")


async def test_a_worker_beats_before_it_starts_anything(config: RunConfig, proxy: Any) -> None:
    await run(config, proxy)
    path, body, _ = proxy.history[0]
    assert path == "/heartbeat"
    assert {body["owner"]} == {body["owner"] for path, body, _ in proxy.history if path == "/groups"}


async def test_every_process_of_a_worker_is_an_instance_of_its_own(config: RunConfig, proxy: Any) -> None:
    for _ in range(2):
        await run(config, proxy)
    assert len(set(proxy.abandoned)) == 2
    assert {owner.rpartition("/")[0] for owner in proxy.abandoned} == {"me"}


async def test_on_a_finished_run_a_worker_plays_only_the_last_evaluation(config: RunConfig, proxy: Any) -> None:
    proxy.published_step = proxy.steps
    await run(config, proxy)
    await run(config, proxy)
    assert played(proxy) == {(1, name): 2 for name in ("sampled", "greedy", "unseen")}


SPY = """
import json, os, subprocess, sys

class Agent:
    async def run(self, data, **extra):
        show = "import json, os; print(json.dumps(dict(os.environ)))"
        child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
        with open("seen.json", "w") as file:
            json.dump({"agent": dict(os.environ), "child": json.loads(child.stdout)}, file)
        return 1.0

def tasks():
    assert "AGENTRL_RUN_KEY" not in os.environ
    return [{"n": 1}]
"""


def test_an_agent_sees_no_secret_in_its_environment(tmp_path: Path, proxy: Any) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "run.yaml").write_text(
        "{name: r, model: tiny, agent: 'spy:Agent', tasks: 'spy:tasks', evaluation: {tasks: 'spy:tasks', size: 1}}"
    )
    command = [sys.executable, "-m", "agentrl", "rollout", "--config", "run.yaml"]
    secrets = {"AGENTRL_RUN_KEY": "k-run", "AGENTRL_ADMIN_KEY": "k-admin", "AGENTRL_DATABASE_URL": "sqlite:///x.db"}
    secrets |= {"AWS_SECRET_ACCESS_KEY": "k-storage", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
    env = os.environ | secrets | {"AGENTRL_PROXY_URL": proxy.url}
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["agent"]["AGENTRL_PROXY_URL"] == proxy.url
    assert not secrets.keys() & (seen["agent"].keys() | seen["child"].keys())
    assert {key for _, _, key in proxy.history} == {"k-run"}


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "{name: r, model: tiny, agent: 'agentrl.agents.reverse:ReverseAgent', tasks: 'agentrl.agents.reverse:x'}"
    )
    command = [sys.executable, "-m", "agentrl", "rollout", "--config", "run.yaml"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTRL_")}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "agentrl: no proxy address: pass base_url or set AGENTRL_PROXY_URL\n"
