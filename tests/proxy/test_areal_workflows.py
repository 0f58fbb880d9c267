"""Workflows with AReaL's names against a real proxy: rewards in processes, the client of an episode, equality."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from agentrl.areal import (
    ArealOpenAI,
    AsyncRewardWrapper,
    GenerationHyperparameters,
    ModelRequest,
    RolloutWorkflow,
    apply_chat_template,
    atrace_session_phase,
    get_math_verify_worker,
    import_from_string,
    load_hf_tokenizer,
    session_context,
    stats_tracker,
    trace_session,
    workflow_context,
)
from agentrl.client import AsyncClient
from agentrl.errors import UserError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards import async_reward
from agentrl.rollout.rewards.async_reward import pools_closed
from agentrl.rollout.workflows.workflow_agent import WorkflowAgent
from agentrl.store.training import recorded_paths, trajectories
from agentrl.testing import Reply

REWARDS = """
import os, time

def right(prompt, completions, prompt_ids, completion_ids, answer, **data):
    assert prompt_ids and completion_ids and os.getpid() != int(data["worker"])
    return float(answer in completions)

def equal(result, answer):
    return float(result == answer)

def slow(result, answer):
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "areal_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made, pools_closed():
        yield made


async def episode(client: AsyncClient, agent: Agent, data: dict[str, Any], session: dict[str, Any]) -> Outcome:
    async with agent_http(20) as http:
        return await play(client, agent, data, session, http=http, timeout_s=60, is_eval=False)


class Rlvr(RolloutWorkflow):
    """One answer, as AReaL's RLVR workflow samples and scores it."""

    def __init__(self, reward_fn: str, tokenizer: str) -> None:
        self.tokenizer = load_hf_tokenizer(tokenizer)
        self.gconfig = GenerationHyperparameters(max_new_tokens=8).new_with_stop_and_pad_token_ids(self.tokenizer)
        self.reward_fn = AsyncRewardWrapper(import_from_string(reward_fn), timeout_seconds=20)

    @trace_session("reward")
    async def score(self, prompt: str, answer: Any, data: dict[str, Any]) -> float:
        text = self.tokenizer.decode(answer.output_tokens)
        value: float = await self.reward_fn(prompt, text, answer.input_tokens, answer.output_tokens, **data)
        return value

    @session_context()
    async def sample(self, engine: Any, request: ModelRequest) -> Any:
        async with atrace_session_phase("generate"):
            return await engine.agenerate(request)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        ids = apply_chat_template(self.tokenizer, data["messages"], tokenize=True, add_generation_prompt=True)
        answer = await self.sample(engine, ModelRequest(input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer))
        reward = await self.score(self.tokenizer.decode(ids), answer, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return {
            "input_ids": [answer.input_tokens + answer.output_tokens],
            "loss_mask": [[0] * answer.input_len + [1] * answer.output_len],
            "logprobs": [[0.0] * answer.input_len + answer.output_logprobs],
            "versions": [[-1] * answer.input_len + answer.output_versions],
            "rewards": [reward],
        }


class Chat:
    """The same task as an agent with the SDK."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        sdk = openai.AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        reply = await sdk.chat.completions.create(model="default", messages=data["messages"], max_tokens=8)
        return float(data["answer"] in (reply.choices[0].message.content or ""))


async def test_a_workflow_and_an_agent_of_one_task_leave_equal_trajectories(proxy: Any, client: AsyncClient) -> None:
    import os

    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "dcba", "worker": os.getpid()}
    group = proxy.post("/groups").json()
    stats_tracker.export_all()
    agents: list[Agent] = [WorkflowAgent(Rlvr("areal_rewards.right", "tiny")), Chat()]
    for agent, session in zip(agents, group["sessions"], strict=True):
        proxy.engine.enqueue(Reply(proxy.says("dcba")))
        outcome = await episode(client, agent, task, session)
        assert (outcome.error, outcome.reward) == (None, 1.0)
    with proxy.database.read() as conn:
        ids = recorded_paths.trainable_ids(conn, proxy.run_id, ["ready"], min_version=None, max_version=None)
        one, other = trajectories.load(conn, ids, ages={0: 0}, discount=1.0).trajectories
    for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures", "turn_returns"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    assert one.episode_return == other.episode_return
    means = stats_tracker.export_all()
    assert means["rollout/reward"] == 1.0
    assert {"rollout/time/generate", "rollout/time/reward", "rollout/time/episode"} < means.keys()


class Turns(RolloutWorkflow):
    """Several turns with the client of an episode, as AReaL's multi-turn example plays them."""

    def __init__(self, *, discount: float = 0.9, last: bool = False) -> None:
        self.discount, self.last = discount, last
        self.reward_fn = AsyncRewardWrapper(import_from_string("areal_rewards.equal"))

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        client = ArealOpenAI(engine=engine, tokenizer=None, chat_template_type="concat", tool_call_parser="qwen25")
        messages = data["messages"]
        for _ in range(2):
            config = GenerationHyperparameters(max_new_tokens=8).to_openai_args_dict()
            response = await client.chat.completions.create(messages=messages, **config)
            messages.append(response.choices[0].message)
            reward = await self.reward_fn(result=messages[-1].content, answer=data["answer"])
            if not self.last:
                client.set_reward(response.id, reward)
            messages.append({"role": "user", "content": "again"})
        if self.last:
            client.set_last_reward(reward)
        client.apply_reward_discount(turn_discount=self.discount)
        return client.export_interactions(style="individual")


@pytest.mark.parametrize("last", [False, True])
async def test_the_client_of_an_episode_rewards_its_calls(proxy: Any, client: AsyncClient, last: bool) -> None:
    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "dcba"}
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
    outcome = await episode(client, WorkflowAgent(Turns(last=last), turn_discount=0.9), task, session)
    assert outcome.error is None
    first, second = proxy.calls(session)
    assert second["parent_id"] == first["id"]
    found = {one["interaction_id"]: one["value"] for one in proxy.get(f"/sessions/{outcome.session_id}")["rewards"]}
    assert found == ({second["id"]: 1.0} if last else {first["id"]: 0.0, second["id"]: 1.0})
    assert task["messages"] == [{"role": "user", "content": "abcd"}]  # the episode had a copy


async def test_a_discount_that_is_not_the_runs_fails_the_session_by_name(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "dcba"}
    outcome = await episode(client, WorkflowAgent(Turns()), task, proxy.session())
    assert "rollout.turn_discount, which is 1: set it to 0.9" in str(outcome.error)


async def test_a_reward_that_never_returns_is_an_error_not_a_zero() -> None:
    async with pools_closed():
        slow = AsyncRewardWrapper(import_from_string("areal_rewards.slow"), timeout_seconds=0.5, max_retries=0)
        started = time.monotonic()
        with pytest.raises(Exception, match=r"areal_rewards:slow: ran longer than 0.5 s \(attempt 1\)"):
            await slow("a", "b")
        assert time.monotonic() - started < 50  # the function would sleep for a minute


async def test_wrappers_of_one_function_share_a_process() -> None:
    async with pools_closed():
        equal = [AsyncRewardWrapper(import_from_string("areal_rewards.equal")) for _ in range(3)]
        values = await asyncio.gather(
            *(one(result="a", answer=answer) for one, answer in zip(equal, "aba", strict=True))
        )
        assert values == [1.0, 0.0, 1.0]
        assert len(async_reward._pools) == 1


def test_mathematical_answers_are_compared_by_value() -> None:
    worker = get_math_verify_worker()
    assert worker.verify("so it is \\boxed{1/2}", "0.5") == 1.0
    assert worker.verify("so it is \\boxed{1/3}", "0.5") == 0.0


def test_a_function_that_another_process_cannot_import_is_refused() -> None:
    with pytest.raises(UserError, match="must be a function at the top of a module"):
        AsyncRewardWrapper(lambda: 1.0)


def test_rewards_of_unknown_calls_are_refused() -> None:
    from agentrl.areal import InferenceEngine
    from agentrl.rollout.workflows.session_engine import SessionEngine

    assert InferenceEngine is SessionEngine
    client = ArealOpenAI(SessionEngine("http://127.0.0.1:1/v1", "key", openai.DefaultAsyncHttpxClient()))
    with pytest.raises(UserError, match="has made no call"):
        client.set_last_reward(1.0)
    with pytest.raises(UserError, match="no call 'x'"):
        client.set_reward("x", 1.0)
    with pytest.raises(UserError, match="style 'leaf' does not exist"):
        client.export_interactions(style="leaf")  # type: ignore[arg-type]


def test_an_unknown_name_suggests_the_nearest() -> None:
    import agentrl.areal

    with pytest.raises(AttributeError, match="ModelRequest"):
        agentrl.areal.ModelReqest  # noqa: B018
    assert all(getattr(agentrl.areal, name) for name in agentrl.areal.MODULES)
