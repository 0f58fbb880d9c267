"""Simulated users: verl's interactions and a model that plays one."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import pytest

from agentrl import ToolBroken, ToolLoop, ToolResult, UserError, tool
from agentrl.rollout.agent import load_agent
from agentrl.rollout.score import Reward
from agentrl.rollout.tools.users.model_user import OPENING
from agentrl.rollout.tools.users.user_entries import user_of
from agentrl.verl import BaseInteraction

ASK = [{"role": "user", "content": "2+2?"}]
PERSON = {"model": "person", "prompt": "Play {who}; end with {stop}.", "stop": "[end]", "temperature": 0.5}


class Teacher(BaseInteraction):
    """One object with a state for each episode, as verl's examples are."""

    def __init__(self, config: dict) -> None:
        super().__init__(config)
        self.states: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.states[instance_id] = {"truth": ground_truth, "said": ""}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict]:
        assert kwargs["ground_truth"] == "4"
        self.states[instance_id]["said"] = messages[-1]["content"]
        score = await self.calculate_score(instance_id)
        return score == 1.0, "Yes." if score else "No.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.states[instance_id]["said"] == self.states[instance_id]["truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self.states[instance_id]


class Plain(BaseInteraction):
    """As short as the base class allows."""

    async def finalize_interaction(self) -> None:  # type: ignore[override]
        self.config["ended"] = True


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under its name, from which entries load it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Teacher.__module__])


def entry(**more: Any) -> dict[str, Any]:
    return {"class_name": f"{__name__}.Teacher", **more}


@pytest.mark.parametrize("rewards", ["turn", "final"])
async def test_a_user_answers_until_the_episode_is_over(model: Any, extra: Any, rewards: str) -> None:
    task = {"extra_info": {"interaction_kwargs": {"ground_truth": "4", "query": "2+2?"}}}
    model.says("5", "4")
    user: Any = user_of(entry(rewards=rewards, name="teacher"))
    async with ToolLoop(extra, task=task, user=user) as loop:
        await loop.run(ASK)
        result = await loop.result()
    assert [one["content"] for one in loop.messages] == ["2+2?", "5", "No.", "4", "Yes."]
    assert (loop.stopped, loop.turns) == ("ended", 2)
    last = {"name": "teacher", "source": "user"}
    steps = (Reward(value=0.0, interaction_id="c1", **last), Reward(value=1.0, interaction_id="c2", **last))
    assert result.rewards == (steps if rewards == "turn" else (Reward(value=1.0, **last),))
    assert user._interaction.states == {}


async def test_an_object_is_a_user_too_and_turns_are_bounded(model: Any, extra: Any) -> None:
    model.says("a", "b")
    user = Plain({})
    async with ToolLoop(extra, user=user, max_turns=2, overrides={"user": {"reward_weight": 0.5}}) as loop:
        await loop.run(ASK)
        assert [one.value for one in await loop.rewards()] == [0.4, 0.4]
    assert (loop.stopped, len(loop.messages), user.config) == ("max_turns", 5, {"ended": True})


async def test_a_model_plays_the_user(model: Any, extra: Any) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "secret"

    model.says("I want a refund.", [("look", {})], "Why?", "It is broken. [end]", "Done.", "[end]")
    async with ToolLoop(extra, [look], task={"who": "Ann"}, user=PERSON) as loop:
        await loop.run([{"role": "system", "content": "Be kind."}])
    assert loop.stopped == "ended"
    opening, _, _, answer = model.requests
    assert (opening["model"], opening["temperature"], opening["max_tokens"]) == ("person", 0.5, 256)
    prompt = [{"role": "system", "content": "Play Ann; end with [end]."}, {"role": "user", "content": OPENING}]
    assert opening["messages"] == prompt
    heard = [{"role": "assistant", "content": "I want a refund."}, {"role": "user", "content": "Why?"}]
    assert answer["messages"] == prompt + heard
    assert loop.messages[-1] == {"role": "user", "content": "It is broken."}


async def test_a_user_that_fails_fails_the_episode(model: Any, extra: Any) -> None:
    class Broken(Plain):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            if self.config["how"] == "slow":
                await asyncio.Event().wait()
            raise ValueError("odd")

    for how, message in {"raise": "the user failed: ValueError: odd", "slow": "the user took longer than 0.1"}.items():
        model.says("a")
        async with ToolLoop(extra, user=Broken({"how": how}), overrides={"user": {"timeout_s": 0.1}}) as loop:
            with pytest.raises(ToolBroken, match=message):
                await loop.run(ASK)
    refused = httpx.Response(400, json={"error": {"message": "no such model"}})
    for reply, message in ((refused, "model 'person' failed: .*no such model"), ("", "said nothing")):
        model.says("a", reply)
        async with ToolLoop(extra, task={"who": "Ann"}, user=PERSON) as loop:
            with pytest.raises(ToolBroken, match=message):
                await loop.run(ASK)
    with pytest.raises(UserError, match=r"user\.prompt: cannot be filled with the task's fields: KeyError\('who'\)"):
        async with ToolLoop(extra, user=PERSON):
            pass


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (7, "user: 7 must be an object with `generate_response`"),
        ({}, "user: needs the key `class_name` or `model`"),
        ({"class_name": "pathlib.Path"}, "must be a class with `generate_response`"),
        ("nowhere:Teacher", "user.class_name: cannot import 'nowhere'"),
        ({"class_name": "a.B", "reward": "turn"}, "there is no key 'reward'; did you mean 'rewards'"),
        ({"class_name": "a.B", "rewards": "all"}, "user.rewards: there is no 'all'"),
        ({"model": "person", "promt": ""}, "user: unknown 'promt'; did you mean 'prompt'"),
    ],
)
def test_a_wrong_user_is_refused(user: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_agent("tool_agent", {"user": user})


async def test_tools_may_end_a_conversation(model: Any, extra: Any) -> None:
    @tool
    def hang_up() -> ToolResult:
        """Hang up."""
        return ToolResult(text="bye", end=True)

    model.says([("hang_up", {})])
    async with ToolLoop(extra, [hang_up], user=Plain({})) as loop:
        await loop.run(ASK)
    assert (loop.stopped, loop.turns) == ("ended", 1)
