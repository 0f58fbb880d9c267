"""Ready-made agents and reward functions against a real proxy: what is asked, and which rewards are recorded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from databases import KINDS
from sqlalchemy import select
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.domain.verdicts import Verdict
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.rollout.runner import sessions_of
from agentrl.store.tables import sessions
from agentrl.testing import Reply

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
FUNCTIONS = """
def right(completion, answer):
    return completion == answer

def close(completion, answer, prompt_ids, completion_ids):
    assert prompt_ids and completion_ids
    return completion[:1] == answer[:1]

def together(prompts, completions):
    return [len(set(prompts)) + 10 * len(completions)] * len(prompts)

def stepwise(completion, messages, answer, completion_ids):
    assert messages[-1]["content"] == completion and completion_ids
    return sum(a == b for a, b in zip(completion, answer))

def which(turn, messages):
    assert sum(message["role"] == "assistant" for message in messages) == turn
    return turn

def broken(completion):
    raise ValueError("out of order")

class Titled:  # asks for a title first, without the tools that its turns have

    async def run(self, data, base_url, api_key, http_client, **extra):
        asked = {"role": "user", "content": data["prompt"]}
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        turns = (
            {"messages": [{"role": "system", "content": "Write a title."}, asked]},
            {"messages": [{"role": "system", "content": "Reverse it."}, asked], "tools": tools},
        )
        for body in turns:
            headers = {"Authorization": f"Bearer {api_key}"}
            body |= {"model": "default", "max_tokens": 16}
            answer = await http_client.post(f"{base_url}/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answered.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made:
        yield made


async def episode(client: AsyncClient, data: dict[str, Any], **config: Any) -> Outcome:
    session = (await client.request("POST", "/groups", {"is_eval": True, "task": data}))["sessions"][0]
    settings = parse_config({"name": "r", "model": "tiny", "tasks": "t.jsonl", **config})
    async with agent_http(20) as http, agent_of(settings) as agent:
        return await play(client, agent, data, session, http=http, timeout_s=60, is_eval=True)


def rewards(proxy: Any, outcome: Outcome) -> dict[str, float]:
    return {one["name"]: one["value"] for one in proxy.get(f"/sessions/{outcome.session_id}")["rewards"]}


async def test_a_dataset_and_one_function_are_enough(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    outcome = await episode(client, {"prompt": "abcd", "answer": "dcba"}, reward="answered:right")
    assert (outcome.error, outcome.reward) == (None, 1.0)
    assert rewards(proxy, outcome) == {"reward": 1.0}
    (call,) = proxy.calls({"session_id": outcome.session_id})
    assert call["new_messages"] == [{"role": "user", "content": "abcd"}]


async def test_components_are_rewards_of_their_names(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dddd")))
    components = {"right": {"function": "answered:right"}, "close": {"function": "answered:close", "weight": 0.25}}
    task = {"messages": [{"role": "user", "content": "abcd"}], "answer": "dcba"}
    outcome = await episode(
        client, task, reward={"components": components}, agent="single_turn", agent_args={"system": "rev"}
    )
    assert outcome.error is None
    assert rewards(proxy, outcome) == {"right": 0.0, "close": 0.25}
    (call,) = proxy.calls({"session_id": outcome.session_id})
    assert call["system"] == [{"role": "system", "content": "rev"}]


async def test_a_wrong_answer_is_followed_by_feedback(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
    outcome = await episode(
        client,
        {"prompt": "abcd", "answer": "dcba"},
        reward="answered:right",
        agent="multi_turn",
        agent_args={"max_turns": 3, "turn_discount": 0.5, "feedback": "no"},
    )
    assert (outcome.error, outcome.reward) == (None, 0.5)
    first, second = proxy.calls({"session_id": outcome.session_id})
    assert second["parent_id"] == first["id"]
    assert second["new_messages"][-1]["content"] == "no"


@pytest.mark.parametrize("agent", ["single_turn", "multi_turn", "tool_agent"])
@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ("answered:right", "dc(B)"),
        pytest.param("choice", "B", marks=pytest.mark.long),
        pytest.param({"function": "exact"}, "dc(b", marks=pytest.mark.long),
    ],
)
async def test_the_session_has_the_answer_that_was_judged(
    proxy: Any, client: AsyncClient, agent: str, reward: Any, answer: str
) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dc(B)")))
    args = {"max_turns": 1} if agent == "multi_turn" else {}
    outcome = await episode(client, {"prompt": "abcd", "answer": "A"}, reward=reward, agent=agent, agent_args=args)
    assert (outcome.error, outcome.reward) == (None, 0.0)
    assert proxy.get(f"/sessions/{outcome.session_id}")["answer"] == answer


async def test_every_call_of_a_session_is_judged(proxy: Any, client: AsyncClient) -> None:
    """The functions see the conversation until the call, and the rewards name the call."""
    proxy.engine.enqueue(*(Reply(proxy.says(text)) for text in ("aaaa", "dcaa", "dcba")))
    components = {
        "right": {"function": "answered:right"},
        "step": {"function": "answered:stepwise", "per": "call", "weight": 0.5},
        "turn": {"function": "answered:which", "per": "call", "weight": 0},
    }
    outcome = await episode(
        client, {"prompt": "abcd", "answer": "dcba"}, reward={"components": components}, agent="multi_turn"
    )
    calls = proxy.calls({"session_id": outcome.session_id})
    session = proxy.get(f"/sessions/{outcome.session_id}")
    of_calls = {one["interaction_id"]: one["value"] for one in session["rewards"] if one["name"] == "step"}
    assert of_calls == {call["id"]: 0.5 * right for call, right in zip(calls, (1, 3, 4), strict=True)}
    assert {one["scope"] for one in session["rewards"] if one["name"] == "step"} == {"call"}
    assert session["stats"] == {"reward/turn": 2.0}  # the mean of the turns 1, 2, 3
    assert (outcome.error, outcome.reward) == (None, 1.0 + 0.5 * 8)


async def test_calls_can_be_judged_without_the_session(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcaa")))
    reward = {"function": "answered:stepwise", "per": "call"}
    outcome = await episode(client, {"prompt": "abcd", "answer": "dcba"}, reward=reward)
    assert (outcome.error, outcome.reward) == (None, 3.0)


async def test_a_call_that_becomes_a_side_call_at_the_end_is_not_judged(proxy: Any, client: AsyncClient) -> None:
    """A title that is asked for first is a main call until the session has ended."""
    proxy.engine.enqueue(Reply(proxy.says("dcaa")), Reply(proxy.says("dcba")))
    components = {
        "step": {"function": "answered:stepwise", "per": "call"},
        "turn": {"function": "answered:which", "per": "call", "weight": 0},
    }
    outcome = await episode(
        client,
        {"prompt": "abcd", "answer": "dcba"},
        reward={"components": components},
        agent="answered:Titled",
    )
    assert outcome.error is None
    title, turn = proxy.calls({"session_id": outcome.session_id})
    assert (title["role"], turn["role"]) == ("side", "main")
    session = proxy.get(f"/sessions/{outcome.session_id}")
    assert [(one["interaction_id"], one["value"]) for one in session["rewards"]] == [(turn["id"], 4.0)]
    assert session["stats"] == {"reward/turn": 1.0}


async def test_a_call_that_cannot_be_judged_fails_the_session(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcaa")))
    reward = {"function": "answered:broken", "per": "call", "retries": 0}
    outcome = await episode(client, {"prompt": "abcd"}, reward=reward)
    assert outcome.error == "RewardFailed: reward reward: ValueError: out of order (attempt 1)"


async def test_turns_are_bounded(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(*(Reply(proxy.says("aaaa")) for _ in range(2)))
    outcome = await episode(
        client,
        {"prompt": "abcd", "answer": "dcba"},
        reward="answered:right",
        agent="multi_turn",
        agent_args={"max_turns": 2},
    )
    assert (outcome.error, outcome.reward) == (None, 0.0)
    assert len(proxy.calls({"session_id": outcome.session_id})) == 2
    with proxy.database.read() as conn:
        verdict = conn.execute(select(sessions.c.verdict).where(sessions.c.id == outcome.session_id)).scalar_one()
    assert Verdict.of(verdict) == Verdict(truncated=True)


async def test_a_reward_that_cannot_be_computed_fails_the_session(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("dcba")))
    outcome = await episode(client, {"prompt": "abcd"}, reward={"function": "answered:broken", "retries": 1})
    assert outcome.reward is None
    assert outcome.error == "RewardFailed: reward reward: ValueError: out of order (attempt 2)"
    assert proxy.get(f"/sessions/{outcome.session_id}")["status"] == "failed"


async def test_a_batch_is_one_group(proxy: Any, client: AsyncClient) -> None:
    reward = {"function": "answered:together", "processes": 1}
    base = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "rollout": {"group_size": 2}}
    settings = parse_config(base | {"reward": reward, "agent_args": {"template": "{n}", "max_tokens": 4}})
    groups = [await client.request("POST", "/groups", {"is_eval": False, "owner": "me"}) for _ in range(2)]
    async with agent_http(20) as http, agent_of(settings) as agent:
        outcomes = await asyncio.gather(
            *(
                play(client, agent, group["task"]["data"], session, http=http, timeout_s=60, is_eval=False)
                for group in groups
                for session in sessions_of(group)
            )
        )
    assert [(outcome.error, outcome.reward) for outcome in outcomes] == [(None, 21.0)] * 4


async def test_a_task_without_a_prompt_fails_its_session(proxy: Any, client: AsyncClient) -> None:
    outcome = await episode(client, {"text": "abcd"}, reward="answered:right")
    assert outcome.error == "UserError: the task has neither messages, prompt nor question; it has text"


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_a_recorded_run_is_scored_again(proxy: Any) -> None:
    for number, text in enumerate(("abcd", "dcba")):
        session = proxy.post("/sessions", {"task": {"prompt": "abcd", "answer": "dcba"}}).json()
        proxy.engine.enqueue(Reply(proxy.says(text)))
        proxy.sdk(session).chat.completions.create(model="default", messages=[{"role": "user", "content": "abcd"}])
        proxy.post(f"/sessions/{session['session_id']}/reward", {"value": number})
        proxy.post(f"/sessions/{session['session_id']}/end")
    Path("run.yaml").write_text("{name: test, model: tiny, tasks: t.jsonl, reward: 'answered:right'}")
    done = CliRunner().invoke(app, ["try-reward", "run.yaml", "--run", "test", "--database-url", proxy.store_url])
    first, second, summary = done.output.splitlines()
    assert (first.split("  ")[0], second.split("  ")[0]) == ("0: reward 1", "1: reward 0")
    assert summary.startswith("2 answers, 0 failed; mean reward 0.500")


def blocks(language: str) -> list[str]:
    """The code blocks of the page about rewards."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


async def test_the_first_example_of_the_page_about_rewards_works(
    proxy: Any, client: AsyncClient, tmp_path: Path
) -> None:
    config, function = yaml.safe_load(blocks("yaml")[0]), blocks("python")[0]
    (tmp_path / "my_rewards.py").write_text(function)
    task = {"prompt": "What is 2 + 3?", "answer": "5"}
    assert str(task).replace("'", '"') in blocks("yaml")[0]
    for said, reward in (("5", 1.0), ("6", 0.0)):
        proxy.engine.enqueue(Reply(proxy.says(said)))
        outcome = await episode(client, task, **config)
        assert (outcome.error, outcome.reward) == (None, reward)


def test_all_configurations_of_the_page_about_rewards_are_valid() -> None:
    for block in blocks("yaml"):
        config = parse_config({"name": "r", "model": "tiny", "tasks": "t.jsonl", **yaml.safe_load(block)})
        assert config.reward is not None
