"""Programs as users write them, against a real proxy: the external one, the packaged agents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from agentrl.agents.calculator import CalculatorAgent
from agentrl.agents.reverse import ReverseAgent
from agentrl.client import AsyncClient
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.testing import Reply

EXTERNAL = Path(__file__).parents[2] / "agents" / "external.py"


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made:
        yield made


async def episode(client: AsyncClient, agent: Any, data: dict[str, Any]) -> Outcome:
    session = (await client.request("POST", "/groups", {"is_eval": True, "task": data}))["sessions"][0]
    async with agent_http(20) as http:
        return await play(client, agent, data, session, http=http, timeout_s=20)


def test_the_external_program_opens_rewards_and_ends_its_own_session(proxy: Any) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    env = os.environ | {"AGENTRL_PROXY_URL": proxy.url, "AGENTRL_RUN_KEY": "run-key"}
    result = subprocess.run([sys.executable, EXTERNAL], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    session_id, said = result.stdout.split()
    assert said == "dcba"
    session = proxy.get(f"/sessions/{session_id}")
    assert session["status"] == "completed"
    assert [reward["value"] for reward in session["rewards"]] == [1.0]


class Greeter:
    """An agent with Anthropic's SDK; `shares` the worker's client or makes one of its own."""

    def __init__(self, *, shares: bool) -> None:
        self.shares = shares

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        own = {name: extra[name] for name in ("base_url", "api_key")}
        client = AsyncAnthropic(max_retries=0, **(extra["anthropic"] if self.shares else own))
        hello = [{"role": "user", "content": "Hi"}]
        reply = await client.messages.create(model="default", max_tokens=9, messages=hello)
        return float(reply.content[0].text == "Hello.")


@pytest.mark.parametrize("shares", [True, False])
async def test_an_agent_with_anthropics_sdk(proxy: Any, client: AsyncClient, shares: bool) -> None:
    proxy.engine.enqueue(Reply(proxy.says("Hello.")))
    outcome = await episode(client, Greeter(shares=shares), {})
    assert (outcome.reward, outcome.error) == (1.0, None)


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        (["calc(12+36)", "Answer: 48"], 1.0),
        pytest.param(["calc(12+36)", "The answer is 48"], 0.6, marks=pytest.mark.long),
        (["calc(12-36)", "Answer: -24"], 0.1),
        (["48"], 0.0),
    ],
)
async def test_the_calculator_agent_calls_its_tool(
    proxy: Any, client: AsyncClient, says: list[str], reward: float
) -> None:
    for text in says:
        proxy.engine.enqueue(Reply(proxy.says(text)))
    data = {"question": "What is 12 plus 36?", "x": 12, "y": 36, "answer": 48}
    outcome = await episode(client, CalculatorAgent(call_tokens=20, answer_tokens=20), data)
    assert (outcome.error, outcome.reward) == (None, reward)
    calls = proxy.calls({"session_id": outcome.session_id})
    assert [call["bridged"] for call in calls] == [False, True][: len(says)]


async def test_a_conversation_of_several_turns_extends_its_own_tokens(proxy: Any, client: AsyncClient) -> None:
    for text in ("dcba", "hxfe"):
        proxy.engine.enqueue(Reply(proxy.says(text)))
    outcome = await episode(client, ReverseAgent(turns=2), {"words": ["abcd", "efgh"]})
    assert outcome.reward == (1.0 + 0.375) / 2
    first, second = (request["input_ids"] for request in proxy.engine.requests)
    assert second[: len(first)] == first


async def test_a_reward_for_an_unknown_call_fails_the_session(proxy: Any, client: AsyncClient) -> None:
    class Confused:
        async def run(self, data: Any, **extra: Any) -> dict[str, float]:
            return {"wrong id": 1.0}

    outcome = await episode(client, Confused(), {})
    session = proxy.get(f"/sessions/{outcome.session_id}")
    assert (session["status"], session["error"]) == ("failed", outcome.error)
    assert "wrong id" in session["error"]
