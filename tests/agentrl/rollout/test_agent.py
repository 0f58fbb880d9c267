"""Loading the user's code, and reading what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.rollout.agent import load_agent, load_tasks
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


def test_tasks_come_from_functions_with_the_seed() -> None:
    one, other = (load_tasks("agentrl.agents.reverse:train_tasks", seed=seed, limit=3) for seed in (1, 2))
    assert len(one) == 3
    assert one != other
    assert one == load_tasks("agentrl.agents.reverse:train_tasks", seed=1, limit=3)


def test_tasks_come_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert load_tasks(str(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        load_tasks(str(path))
    path.write_text("7\n")
    with pytest.raises(UserError, match=r"item 0 .* is int"):
        load_tasks(str(path))
    path.write_text("")
    with pytest.raises(UserError, match="yields no task"):
        load_tasks(str(path))
    with pytest.raises(UserError, match="cannot read"):
        load_tasks(str(tmp_path / "absent.jsonl"))


def test_results_become_rewards() -> None:
    assert result_of(None) == Result()
    assert result_of(1) == Result(rewards=(Reward(value=1.0),))
    assert result_of({"chatcmpl-1": 0.5}).rewards == (Reward(value=0.5, interaction_id="chatcmpl-1"),)
    score = Score((Reward(value=1.0, name="right"), Reward(value=0.5, name="form")))
    assert result_of(score).rewards == score.rewards
    assert (score.value, score.scaled(0.5).value) == (1.5, 0.75)
    assert {reward.interaction_id for reward in score.of_call("c").rewards} == {"c"}
    for bad in ("no", float("nan"), {"chatcmpl-1": None}, 10**400, {"chatcmpl-1": -(10**400)}):
        with pytest.raises(UserError):
            result_of(bad)
