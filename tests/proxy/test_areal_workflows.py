"""Workflows with AReaL's names against a real proxy: rewards in processes, the client of an episode, equality."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
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
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import UserError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards import async_reward
from agentrl.rollout.rewards.async_reward import pools_closed
from agentrl.rollout.workflows.session_engine import SessionEngine
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
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    """Real SGLang takes the likeliest tokens, though the run's temperature must be more than 0."""
    run_config["rollout"]["sampling"] = {"temperature": 1e-4}
    return run_config


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
    check_equal_trajectories(proxy)
    means = stats_tracker.export_all()
    assert means["rollout/reward"] == 1.0
    assert {"rollout/time/generate", "rollout/time/reward", "rollout/time/episode"} < means.keys()
    of_workflow, of_agent = [proxy.get(f"/sessions/{one['session_id']}")["stats"] for one in group["sessions"]]
    assert of_workflow.keys() == {"reward", "time/generate", "time/reward", "time/episode"}
    assert of_workflow["reward"] == 1.0
    assert of_agent == {}


@pytest.mark.engine
async def test_real_sglang_gives_both_the_same_greedy_tokens(real_proxy: Any) -> None:
    import os

    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "", "worker": os.getpid()}
    agents: list[Agent] = [WorkflowAgent(Rlvr("areal_rewards.right", "tiny")), Chat()]
    async with (
        AsyncClient(real_proxy.url, "run-key", timeout_s=60) as client,
        pools_closed(),
        aiohttp.ClientSession() as http,
    ):
        for agent, session in zip(agents, real_proxy.post("/groups").json()["sessions"], strict=True):
            await SGLangClient(real_proxy.engine.url, http).flush_cache()  # a cached prompt is computed in other shapes
            outcome = await episode(client, agent, task, session)
            assert (outcome.error, outcome.reward) == (None, 1.0)
    check_equal_trajectories(real_proxy)


def check_equal_trajectories(proxy: Any) -> None:
    """The run has two trajectories, with equal arrays: what a loss reads."""
    with proxy.database.read() as conn:
        ids = recorded_paths.trainable_ids(conn, proxy.run_id, ["ready"], min_version=None, max_version=None)
        one, other = trajectories.load(conn, ids, ages={0: 0}, discount=1.0).trajectories
    for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures", "turn_returns"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    assert one.episode_return == other.episode_return
    assert one.loss_mask.any()


class Turns(RolloutWorkflow):
    """Several turns with the client of an episode, as AReaL's multi-turn example plays them."""

    def __init__(self, *, discount: float = 0.9, last: bool = False, style: Any = "individual") -> None:
        self.discount, self.last, self.style = discount, last, style
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
        return client.export_interactions(style=self.style)


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.long)])
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


class Streams(RolloutWorkflow):
    """Streamed turns, of which it reads all chunks, one or none. Each is rewarded before its end."""

    def __init__(self, reads: int | None) -> None:
        self.reads = reads
        self.calls: dict[str, Any] = {}
        self.text = ""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        client: Any = ArealOpenAI(engine=engine)  # as in AReaL, calls need no `model`
        for turn in range(2):
            stream = await client.chat.completions.create(messages=data["messages"], max_tokens=8, stream=True)
            client.set_last_reward(turn + 1.0)
            if self.reads == 0:
                continue
            async for chunk in stream:
                self.text += chunk.choices[0].delta.content or ""
                if self.reads == 1:
                    break
        self.calls = client.export_interactions(style="individual")
        return self.calls


@pytest.mark.parametrize("reads", [None, 1, 0])
async def test_a_streamed_call_is_recorded_and_rewarded_however_much_is_read(
    proxy: Any, client: AsyncClient, reads: int | None
) -> None:
    workflow, session = Streams(reads), proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
    data = {"messages": [{"role": "user", "content": "abcd"}]}
    outcome = await episode(client, WorkflowAgent(workflow), data, session)
    assert (outcome.error, outcome.reward) == (None, 3.0)
    assert workflow.text == ("abcddcba" if reads is None else "")
    calls = proxy.calls(session)
    assert [(call["status"], call["role"]) for call in calls] == [("complete", "main")] * 2
    assert "free" not in [call["delivery"] for call in calls]
    rewards = {one["interaction_id"]: one["value"] for one in proxy.get(f"/sessions/{outcome.session_id}")["rewards"]}
    assert rewards == {call["id"]: value for call, value in zip(calls, (1.0, 2.0), strict=True)}
    answers = [one.response for one in workflow.calls.values()]
    assert [one.choices[0].message.content for one in answers] == ["abcd", "dcba"]
    assert {one.choices[0].finish_reason for one in answers} == {"stop"}
    assert [one.id for one in answers] == list(workflow.calls)


async def test_a_stream_that_breaks_fails_its_reader_and_is_no_call(proxy: Any, client: AsyncClient) -> None:
    class Breaks(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            client: Any = ArealOpenAI(engine=engine)
            stream = await client.chat.completions.create(messages=data["messages"], stream=True)
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
            assert client.export_interactions() == {}
            return None

    session = proxy.session()
    proxy.engine.enqueue(*[Reply(proxy.says("abcd"), drop_after=2)] * 20)
    outcome = await episode(
        client, WorkflowAgent(Breaks()), {"messages": [{"role": "user", "content": "abcd"}]}, session
    )
    assert outcome.error is None


@pytest.mark.long
async def test_the_style_concat_exports_the_last_call_of_a_conversation(proxy: Any, client: AsyncClient) -> None:
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "dcba"}
    outcome = await episode(client, WorkflowAgent(Turns(style="concat"), turn_discount=0.9), task, session)
    assert outcome.error is None
    _, second = proxy.calls(session)
    (reward,) = proxy.get(f"/sessions/{outcome.session_id}")["rewards"]
    assert (reward["interaction_id"], reward["value"]) == (second["id"], 1.0)


async def test_the_style_concat_exports_a_call_for_each_branch(proxy: Any) -> None:
    session = proxy.session()
    async with openai.DefaultAsyncHttpxClient() as http:
        sdk: Any = ArealOpenAI(SessionEngine(f"{proxy.url}/v1", session["api_key"], http))
        messages: list[Any] = [{"role": "user", "content": "abcd"}]
        first = await sdk.chat.completions.create(messages=messages, max_tokens=4)
        messages.append(first.choices[0].message)
        left = await sdk.chat.completions.create(messages=messages, max_tokens=4)
        edited = [*messages[:1], {"role": "assistant", "content": "another answer"}, *messages[:1]]
        right = await sdk.chat.completions.create(messages=edited, max_tokens=4)
        asked = await sdk.responses.create(input="abcd", max_output_tokens=16)
        items = [{"role": "user", "content": "abcd"}, *asked.output, {"role": "user", "content": "again"}]
        again = await sdk.responses.create(input=items, max_output_tokens=16)
    assert list(sdk.export_interactions("individual")) == [one.id for one in (first, left, right, asked, again)]
    assert list(sdk.export_interactions("concat")) == [left.id, right.id, again.id]


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
