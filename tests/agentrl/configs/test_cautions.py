"""What is said of settings that rarely are what their user wants, and that it is true."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.domain.credit import CallFact, SessionRewards, call_returns


def config(**parts: Any) -> RunConfig:
    return parse_config({"name": "r", "model": "tiny", **parts})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, False),
        ({"rollout": {"turn_discount": 0.9}}, True),
        ({"rollout": {"turn_discount": 0.9}, "trainer": {"algorithm": "reinforce++"}}, True),
        ({"rollout": {"turn_discount": 0.9}, "trainer": {"algorithm": {"credit": "trajectory"}}}, False),
        ({"rollout": {"turn_discount": 0.9}, "trainer": {"algorithm": "ppo"}}, False),  # a critic expects each turn
        ({"rollout": {"turn_discount": 0.9}, "steps": 0}, False),  # nothing is trained
    ],
)
def test_a_discount_with_credit_per_turn_is_cautioned_against(parts: dict[str, Any], said: bool) -> None:
    assert ["turn_discount 0.9" in text for text in config(**parts).cautions] == [True] * said


@pytest.mark.parametrize(
    ("teacher", "weight", "said"),
    [({"sums": "tiny"}, 0, True), ({"sums": "tiny"}, 0.5, False), ({"sums": "tiny", "words": "tiny"}, 0, False)],
)
def test_sources_from_which_nothing_is_learned_are_cautioned_against(teacher: Any, weight: float, said: bool) -> None:
    trainer = {"teacher": teacher, "algorithm": {"distill_coef": 1.0, "reward_weight": weight}}
    found = config(tasks=["sums.jsonl", "words.jsonl"], agent="a:B", trainer=trainer).cautions
    assert ["nothing is learned from tasks of words," in text for text in found] == [True] * said


def test_late_turns_of_a_longer_episode_exceed_the_baseline() -> None:
    """Two episodes that both earn 1, in one turn and in six: what the caution says."""

    def returns(turns: int) -> list[float]:
        calls = [CallFact(str(i), str(i - 1) if i else None, "main") for i in range(turns)]
        return list(call_returns(calls, SessionRewards(1.0), 0.9).values())

    short, long = returns(1), returns(6)
    baseline = (short[0] + long[0]) / 2
    assert long[0] < baseline < long[-1] == short[0]
