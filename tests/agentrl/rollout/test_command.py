"""Programs as agents: real processes and a real proxy. What they find, how they reward, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from borrowed import proxy_fixtures
from liveness import is_alive

from agentrl.client import AsyncClient
from agentrl.errors import UserError
from agentrl.processes import guard
from agentrl.rollout.agent import load_agent
from agentrl.rollout.command import CommandAgent
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http

_shared = proxy_fixtures("command_proxy_conftest")
database_kind, run_config, store_url, proxy, until = (
    getattr(_shared, name) for name in ("database_kind", "run_config", "store_url", "proxy", "until")
)

TASK = """
import json, os
task = json.load(open(os.environ["AGENTRL_TASK_FILE"]))
def reward(text):
    open(os.environ["AGENTRL_REWARD_FILE"], "w").write(text)
"""
SDK = """
from openai import OpenAI
OpenAI().chat.completions.create(model="default", messages=[{"role": "user", "content": str(task["n"])}])
"""
CALL = """
import urllib.request  # starts ten times as fast as the SDK
def post(url, key, body):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
asked = {"model": "default", "messages": [{"role": "user", "content": str(task["n"])}]}
reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], asked)
"""
ASK = TASK + CALL
POST = """
path, body = PATH_AND_BODY
post(os.environ["AGENTRL_PROXY_URL"] + path, os.environ["AGENTRL_RUN_KEY"], body)
"""
HANG = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
                          "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
with open(os.environ["PIDS"] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
time.sleep(600)
"""


@pytest.fixture
def episode(proxy: Any) -> Callable[..., Any]:
    """Play one session of a training group with a Python program; returns its outcome and what the proxy knows."""

    def run(program: str, data: Any = None, timeout_s: float = 60.0) -> tuple[Outcome, dict[str, Any]]:
        session = proxy.session()

        async def go() -> Outcome:
            async with AsyncClient(proxy.url, "run-key", timeout_s=20) as client, agent_http(20) as http:
                agent = CommandAgent([sys.executable, "-c", program])
                task = {"n": 7} if data is None else data
                return await play(client, agent, task, session, http=http, timeout_s=timeout_s, is_eval=False)

        outcome = asyncio.run(go())
        return outcome, proxy.get(f"/sessions/{outcome.session_id}")

    return run


def alive(pids: str) -> list[int]:
    """Those of the processes that still run."""
    return [int(pid) for pid in pids.split() if is_alive(int(pid))]


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where HANG says which processes it made of itself."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


def test_the_plain_sdk_plays_and_is_rewarded_by_its_file(episode: Any, proxy: Any) -> None:
    outcome, session = episode(TASK + SDK + "reward('0.5')")
    assert (outcome.error, outcome.reward) == (None, 0.5)
    assert (session["status"], session["interactions"]) == ("completed", 1)
    assert [(r["value"], r["interaction_id"]) for r in session["rewards"]] == [(0.5, None)]
    (call,) = proxy.calls(session)
    assert call["new_messages"][0]["content"] == "7"


def test_a_reward_may_name_calls(episode: Any, proxy: Any) -> None:
    outcome, session = episode(ASK + "reward(json.dumps({reply['id']: 0.25}))")
    assert outcome.error is None
    (call,) = proxy.calls(session)
    assert [(r["value"], r["interaction_id"]) for r in session["rewards"]] == [(0.25, call["id"])]


@pytest.mark.parametrize(
    ("posted", "of_a_call"),
    [
        ('f"/sessions/{os.environ[\'AGENTRL_SESSION_ID\']}/reward", {"value": 1.0}', False),
        ('"/rl/set_reward", {"reward": 1.0}', True),  # AReaL's goes to the last call
    ],
)
def test_a_program_may_reward_by_itself(episode: Any, proxy: Any, posted: str, of_a_call: bool) -> None:
    outcome, session = episode(ASK + POST.replace("PATH_AND_BODY", posted))
    assert (outcome.error, outcome.reward) == (None, None)
    (call,) = proxy.calls(session)
    expected = call["id"] if of_a_call else None
    assert [(r["value"], r["interaction_id"]) for r in session["rewards"]] == [(1.0, expected)]


@pytest.mark.parametrize(
    "text",
    ["well done", "NaN", '{"chatcmpl-1": "x"}', "[" * 2000]
    + [pytest.param(text, marks=pytest.mark.long) for text in ('"1.0"', "[1.0]", "true")],
    ids=lambda text: text[:12],
)
def test_an_invalid_reward_fails_the_session(episode: Any, text: str) -> None:
    outcome, session = episode(ASK + f"reward({text!r})")
    assert outcome.error is not None
    assert session["status"] == "failed"
    assert session["rewards"] == []


def test_a_program_that_fails_fails_its_session_with_what_it_said(episode: Any) -> None:
    program = ASK + "import sys; print(os.environ['OPENAI_API_KEY'], 'x' * 9000, 'no tool', file=sys.stderr); exit(3)"
    outcome, session = episode(program + "\nreward('1.0')")
    assert session["status"] == "failed"
    assert "ended with exit status 3: xxx" in session["error"]
    assert session["error"].endswith("x no tool")
    assert outcome.reward is None
    outcome, session = episode("import os, sys; sys.exit('key ' + os.environ['OPENAI_API_KEY'])")
    assert session["error"].endswith("exit status 1: key [session key]")
    outcome, session = episode("import os; os.kill(os.getpid(), 11)")
    assert f"exit status {128 + 11}" in session["error"]


def test_a_program_that_hangs_is_ended_with_its_children(
    episode: Any, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    outcome, session = episode(HANG, timeout_s=3.0)
    assert time.monotonic() - started < guard.GRACE_S + 120
    assert (outcome.error, session["status"]) == ("the agent ran longer than 3 s", "failed")
    assert alive(pids.read_text()) == []


def test_children_do_not_outlive_a_program_that_ends_well(episode: Any, pids: Path) -> None:
    outcome, _ = episode(HANG.replace("time.sleep(600)\n", "") + ASK + "reward('1')")
    assert (outcome.error, outcome.reward) == (None, 1.0)
    assert alive(pids.read_text()) == []


def test_a_daemon_that_keeps_stderr_open_does_not_delay_the_episode(episode: Any, pids: Path) -> None:
    daemon = HANG.replace("Popen(", "Popen(start_new_session=True, args=").replace("time.sleep(600)\n", "")
    outcome, _ = episode(daemon + ASK + "reward('1')")
    assert outcome.reward == 1.0
    for pid in alive(pids.read_text()):  # it left the group on purpose: ours to end
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def variables(proxy: Any, tmp_path: Path) -> Callable[[Any], dict[str, str]]:
    """The environment of a program that plays a task."""

    def found(task: Any) -> dict[str, str]:
        file = tmp_path / "env.json"
        program = f"import json, os; json.dump(dict(os.environ), open({str(file)!r}, 'w'))"
        program += "; json.load(open(os.environ['AGENTRL_TASK_FILE']))"
        asyncio.run(CommandAgent([sys.executable, "-c", program]).run(task, base_url=BASE, api_key="k", is_eval=True))
        env: dict[str, str] = json.loads(file.read_text())
        return env

    return found


BASE = "http://127.0.0.1:1/sessions/abc/v1"


def test_the_environment_has_the_task_the_addresses_and_the_key(variables: Any) -> None:
    env = variables({"question": "é?"})
    assert json.loads(env["AGENTRL_TASK"]) == {"question": "é?"}
    names = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "AGENTRL_PROXY_URL", "AGENTRL_SESSION_ID", "AGENTRL_IS_EVAL")
    assert [env[name] for name in names] == [BASE, BASE.removesuffix("/v1"), "http://127.0.0.1:1", "abc", "1"]
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "AGENTRL_RUN_KEY")
    assert {env[name] for name in keys} == {"k"}
    assert not Path(env["AGENTRL_TASK_FILE"]).exists()  # gone with the episode


@pytest.mark.parametrize(("own", "given"), [(None, "default"), ("claude-x", "claude-x")])
def test_claude_code_is_told_the_model_unless_the_user_names_one(
    variables: Any, monkeypatch: pytest.MonkeyPatch, own: str | None, given: str
) -> None:
    monkeypatch.delenv("ANTHROPIC_MODEL", raising=False)
    if own is not None:
        monkeypatch.setenv("ANTHROPIC_MODEL", own)
    env = variables({})
    assert env["ANTHROPIC_MODEL"] == given
    assert "OPENAI_MODEL" not in env  # programs name judges by it


def test_secrets_of_the_worker_are_not_passed_on(variables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AGENTRL_ADMIN_KEY",
        "AGENTRL_RUN_KEY",
        "AGENTRL_DATABASE_URL",
        "AWS_SESSION_TOKEN",
        "ANTHROPIC_AUTH_TOKEN",
    ):
        monkeypatch.setenv(name, "a-secret-of-the-worker")
    monkeypatch.setenv("MY_TOOL", "kept")
    env = variables({})
    assert "a-secret-of-the-worker" not in str(env)
    assert env["MY_TOOL"] == "kept"


def test_a_task_that_no_variable_holds_is_in_its_file(variables: Any) -> None:
    assert variables({"text": "x" * 300_000})["AGENTRL_TASK"] == ""


def test_a_command_is_checked_before_anything_starts(tmp_path: Path) -> None:
    agent = load_agent([sys.executable, "-c", "pass"], {})
    assert isinstance(agent, CommandAgent)
    load_agent(["sh", "-c", "true"], {})
    plain = tmp_path / "plain"
    plain.write_text("")
    for name, why in (("no-such-program", "No such file or directory"), (str(plain), "Permission denied")):
        with pytest.raises(UserError, match=f"^agent: cannot run '{name}': {why}$"):
            load_agent([name], {})
    with pytest.raises(UserError, match=r"^agent: an empty command$"):
        load_agent([], {})
    with pytest.raises(UserError, match="agent_args"):
        load_agent([sys.executable], {"turns": 2})


def test_a_stopped_episode_leaves_nothing(pids: Path, until: Any) -> None:
    async def stop() -> None:
        task = asyncio.create_task(
            CommandAgent([sys.executable, "-c", HANG]).run({}, base_url=BASE, api_key="k", is_eval=False)
        )
        while not pids.exists():  # noqa: ASYNC110, ASYNC240  another process writes it
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    assert alive(pids.read_text()) == []


CONFIG = {
    "name": "test",
    "model": "tiny",
    "tasks": "t.jsonl",
    "steps": 10,
    "rollout": {"group_size": 2, "max_concurrent_groups": 1},
    "trainer": {"groups_per_step": 2},
}


@pytest.fixture
def worker(proxy: Any, tmp_path: Path) -> Any:
    """`agentrl rollout` as a process of its own, with a program as its agent."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, **more: Any) -> subprocess.Popen[bytes]:
        config = CONFIG | {"agent": [sys.executable, "-c", program]} | more
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / "t.jsonl").write_text('{"n": 1}\n')
        line = [sys.executable, "-m", "agentrl", "rollout", "--config", "run.yaml", "--url", proxy.url]
        env = os.environ | {"AGENTRL_RUN_KEY": "run-key", "AGENTRL_ADMIN_KEY": "admin-key"}
        with (tmp_path / "worker.log").open("wb") as log:
            started.append(subprocess.Popen(line, cwd=tmp_path, env=env, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_plays_groups_and_evaluations_with_a_program(proxy: Any, worker: Any, until: Any) -> None:
    program = ASK + "reward(os.environ['AGENTRL_IS_EVAL'])"
    worker(program, evaluation={"tasks": "t.jsonl", "size": 1})
    until(lambda: proxy.get("/api/run")["groups"].get("ready", 0) >= 2, 120)
    evaluated = proxy.get(f"/api/runs/{proxy.run_id}/evaluations")
    rewards = [(e["step"], name, result["reward"]) for e in evaluated for name, result in e["settings"].items()]
    assert rewards == [(0, "greedy", 1.0), (0, "sampled", 1.0)]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGINT))],
)
def test_a_worker_that_dies_leaves_no_program_behind(worker: Any, pids: Path, until: Any, number: int) -> None:
    process = worker(HANG, rollout={"group_size": 1, "min_group_size": 1, "max_concurrent_groups": 1})
    until(pids.exists, 60)
    process.send_signal(number)
    process.wait(120)
    until(lambda: alive(pids.read_text()) == [], guard.GRACE_S + 120)
