"""Episodes in processes of their own against a real proxy: rewards, failures and time-outs are recorded as in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.rollout.agent_processes import agent_process
from agentrl.rollout.agent_processes.agent_pool import AgentPool
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.testing import Reply

AGENT = """
import os, time
from openai import OpenAI
from agentrl.areal import stats_tracker

class Agent:  # it uses the blocking SDK
    async def run(self, data, **extra):
        client = OpenAI(base_url=extra["base_url"], api_key=extra["api_key"])
        messages = [{"role": "user", "content": "abcd"}]
        text = client.chat.completions.create(model="default", messages=messages).choices[0].message.content
        stats_tracker.get("rollout").scalar(letters=len(text))
        if data["end"] == "crash":
            os._exit(3)
        if data["end"] == "hang":
            time.sleep(600)
        return float(text == "dcba") if data["end"] == "own" else await extra["score"](messages, text)

def right(completion):
    return completion == "dcba"
"""


@pytest.fixture
async def client(proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    (tmp_path / "blocking_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made:
        yield made


async def episode(client: AsyncClient, end: str, timeout_s: float = 60.0) -> Outcome:
    session = (await client.request("POST", "/groups", {"is_eval": True, "task": {"end": end}}))["sessions"][0]
    config = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "agent": "blocking_agent:Agent"}
    rollout = {"processes": 1}
    settings = parse_config(config | {"rollout": rollout, "reward": "blocking_agent:right"})
    async with agent_http(20) as http, AgentPool(settings) as pool:
        return await play(client, pool, {"end": end}, session, http=http, timeout_s=timeout_s, is_eval=True)


@pytest.mark.parametrize("end", [pytest.param("own", marks=pytest.mark.long), "scored"])
async def test_a_blocking_agent_is_recorded_and_rewarded(proxy: Any, client: AsyncClient, end: str) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    outcome = await episode(client, end)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    assert [one["value"] for one in proxy.get(f"/sessions/{outcome.session_id}")["rewards"]] == [1.0]
    assert proxy.get(f"/sessions/{outcome.session_id}")["stats"] == {"letters": 4.0}


@pytest.mark.long
async def test_a_crash_fails_the_session_which_earns_nothing(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    outcome = await episode(client, "crash")
    assert (outcome.error, outcome.reward) == ("its process died (exit status 3)", None)
    session = proxy.get(f"/sessions/{outcome.session_id}")
    assert (session["status"], session["error"], session["rewards"]) == ("failed", outcome.error, [])


@pytest.mark.long
async def test_a_hanging_agent_fails_at_its_timeout(
    proxy: Any, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "CANCEL_S", 0.2)
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    outcome = await episode(client, "hang", timeout_s=3.0)
    assert outcome.error == "the agent ran longer than 3 s"
    assert proxy.get(f"/sessions/{outcome.session_id}")["status"] == "failed"
