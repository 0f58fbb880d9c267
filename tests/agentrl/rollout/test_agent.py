"""Loading the user's code, and reading what it returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.rollout.agent import load_agent
from agentrl.rollout.score import Result, Reward, Score, result_of


def test_an_agent_is_built_with_its_arguments() -> None:
    agent = load_agent("agentrl.agents.reverse:ReverseAgent", {"turns": 2})
    assert agent.turns == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("agentrl.agents.reverse", {}, "must look like module:name"),
        ("agentrl.agents.nowhere:A", {}, "cannot import 'agentrl.agents.nowhere'"),
        ("agentrl.agents.reverse:ReversAgent", {}, "did you mean 'ReverseAgent'"),
        ("agentrl.agents.reverse:score", {}, "async def run"),
        ("agentrl.agents.reverse:ReverseAgent", {"turn": 2}, "unexpected keyword argument 'turn'"),
    ],
)
def test_an_invalid_agent_is_refused_by_name(spec: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_agent(spec, args)


def test_results_become_rewards() -> None:
    assert result_of(None) == Result()
    assert result_of(1) == Result(rewards=(Reward(value=1.0),))
    assert result_of({"chatcmpl-1": 0.5}).rewards == (Reward(value=0.5, interaction_id="chatcmpl-1"),)
    score = Score((Reward(value=1.0, name="right"), Reward(value=0.5, name="form")))
    assert result_of(score).rewards == score.rewards
    assert (score.value, score.scaled(0.5).value) == (1.5, 0.75)
    assert result_of(replace(score, answer="4")).answer == "4"
    with pytest.raises(UserError, match="answer must be a text or a number, got list"):
        result_of(Result(answer=["4"]))  # type: ignore[arg-type]
    assert {reward.interaction_id for reward in score.of_call("c").rewards} == {"c"}
    for bad in ("no", float("nan"), {"chatcmpl-1": None}, 10**400, {"chatcmpl-1": -(10**400)}):
        with pytest.raises(UserError):
            result_of(bad)
