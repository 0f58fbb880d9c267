"""Weights, names, retries and failures of reward functions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.rollout.episode_stats import measured
from agentrl.rollout.rewards.answer_scorer import RewardFailed, Scorer
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.score import Score

FUNCTIONS = """
import pathlib

def right(completion, answer):
    return completion == answer

def length(completion):
    return len(completion)

def parts(completion):
    return {"a": 1, "b": 2}

def silent(completion):
    return None

def flaky(completion):
    tries = pathlib.Path("tries")
    count = int(tries.read_text()) if tries.exists() else 0
    tries.write_text(str(count + 1))
    if count < 2:
        raise OSError("not yet")
    return 1.0

def rank(prompts, completions):
    best = max(map(len, completions))
    return [len(text) / best for text in completions]

def reads(completion, key="answer"):
    return {"score": 0.5, key: completion.rpartition("=")[2] if "=" in completion else None}

def reads_all(prompts, completions):
    return [{"score": 1, "pred": len(text)} for text in completions]

async def asks(completion, messages):
    return len(messages)
"""
RIGHT = {"function": "scored:right"}


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scored.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def an_answer(text: str) -> dict[str, Any]:
    return answer_of({"answer": "42"}, [{"role": "user", "content": "?"}], text)


async def score(text: str, **config: Any) -> Score:
    settings = RewardConfig.model_validate({"processes": 1, **config})
    async with RewardPool(settings) as pool:
        return await Scorer(settings, pool).score(an_answer(text))


async def test_components_are_weighted_and_named() -> None:
    components = {
        "right": RIGHT | {"weight": 2.0},
        "length": {"function": "scored:length", "weight": -0.1},
        "parts": {"function": "scored:parts"},
        "silent": {"function": "scored:silent"},
        "asks": {"function": "scored:asks"},
    }
    found = await score("42", components=components)
    values = {reward.name: reward.value for reward in found.rewards}
    assert values == {"right": 2.0, "length": -0.2, "parts.a": 1.0, "parts.b": 2.0, "asks": 2.0}
    assert {reward.source for reward in found.rewards if reward.name == "right"} == {"scored:right"}


async def test_a_component_without_weight_is_measured_and_is_no_reward() -> None:
    with measured() as stats:
        components = {
            "right": RIGHT,
            "length": {"function": "scored:length", "weight": 0.0},
            "parts": {"function": "scored:parts", "weight": 0.0},
        }
        found = await score("42", components=components)
    assert {reward.name: reward.value for reward in found.rewards} == {"right": 1.0}
    assert stats.means() == {"length": 2.0, "parts.a": 1.0, "parts.b": 2.0}
    with pytest.raises(ValidationError, match="a `weight` other than 0"):
        RewardConfig.model_validate({"components": {"right": RIGHT | {"weight": 0}}})


@pytest.mark.parametrize(
    ("text", "used", "answer"),
    [
        ("6 * 7 = 42", ["right", "reads"], "42"),  # the first that reads answers
        ("no idea", ["right", "reads"], None),  # it has found none
        ("6 * 7  = 42", ["right", "length"], "6 * 7 = 42"),  # none reads answers: the text
        ("  ", ["right"], None),
        ("6 * 7 = 42", ["reads_all", "reads"], "10"),
    ],
)
async def test_a_score_has_the_answer_that_was_judged(text: str, used: list[str], answer: str | None) -> None:
    found = await score(text, components={name: {"function": f"scored:{name}"} for name in used})
    assert (found.answer, found.scaled(0.5).answer, found.of_call("c").answer) == (answer,) * 3


async def test_a_value_in_place_of_one_that_failed_has_the_text_as_its_answer() -> None:
    assert (await score("42", function="scored:flaky", retries=0, on_error=0.0)).answer == "42"


async def test_one_function_gives_the_reward_of_the_session() -> None:
    (reward,) = (await score("42", **RIGHT)).rewards
    assert (reward.name, reward.value, reward.interaction_id) == ("reward", 1.0, None)


async def test_a_failed_call_is_tried_again() -> None:
    assert (await score("x", function="scored:flaky", retries=2)).value == 1.0


async def test_a_reward_that_cannot_be_computed_fails() -> None:
    with pytest.raises(RewardFailed, match=r"reward reward: OSError: not yet \(attempt 2\)"):
        await score("x", function="scored:flaky", retries=1)


async def test_on_error_replaces_a_reward_that_cannot_be_computed() -> None:
    (reward,) = (await score("x", function="scored:flaky", retries=0, on_error=-1)).rewards
    assert (reward.value, reward.source) == (-1.0, "on_error")


async def test_an_answer_without_any_value_fails() -> None:
    with pytest.raises(RewardFailed, match="no reward function returned a value"):
        await score("x", function="scored:silent")


async def test_the_answers_of_a_group_are_one_batch() -> None:
    settings = RewardConfig(function="scored:rank", processes=1)
    async with RewardPool(settings) as pool:
        scorer = Scorer(settings, pool)
        asked = [scorer.score(an_answer("x" * n), group_id="g", session_id=str(n), group_size=3) for n in (1, 2)]
        waiting = asyncio.gather(*asked)
        await asyncio.sleep(0)
        scorer.ended("g", "3", 3)
        assert [found.value for found in await waiting] == [0.5, 1.0]
        assert (await scorer.score(an_answer("abc"))).value == 1.0
