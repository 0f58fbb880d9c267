"""Puzzles of reasoning-gym against a real proxy, with both ready-made agents and the run's reward processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gyms import needs_gyms

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.environments.reasoning_tasks import tasks
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.testing import Reply

pytestmark = needs_gyms
REWARD = {"function": "agentrl.environments.reasoning_score:ReasoningScore", "processes": 1, "timeout_s": 120}


@pytest.fixture
def proxy(shared_proxy: Any) -> Any:
    return shared_proxy


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=60) as made:
        yield made


async def episode(client: AsyncClient, data: dict[str, Any], **config: Any) -> Outcome:
    session = (await client.request("POST", "/groups", {"is_eval": True, "task": data}))["sessions"][0]
    settings = parse_config({"name": "r", "model": "tiny", "tasks": "t.jsonl", "reward": REWARD, **config})
    async with agent_http(60) as http, agent_of(settings) as agent:
        return await play(client, agent, data, session, http=http, timeout_s=300, is_eval=True)


@pytest.mark.long
async def test_one_answer_has_the_librarys_score_and_another_turn_may_be_better(
    proxy: Any, client: AsyncClient
) -> None:
    (task,) = tasks(["gcd"], size=1, examples=1)
    wrong = f"{task['answer']} or not"
    proxy.engine.enqueue(Reply(proxy.says(wrong)), Reply(proxy.says(task["answer"])))
    first = await episode(client, task)
    assert first.error is None
    assert first.reward == pytest.approx(len(task["answer"]) / len(wrong))
    proxy.engine.clear()
    proxy.engine.enqueue(Reply(proxy.says(wrong)), Reply(proxy.says(task["answer"])))
    second = await episode(client, task, agent="multi_turn", agent_args={"turn_discount": 0.5})
    assert (second.error, second.reward) == (None, 0.5)
    (call, _) = proxy.calls({"session_id": second.session_id})
    assert [message["role"] for message in call["new_messages"]] == ["user", "assistant", "user"]
