"""agentrl.rollout.rewards.scored_agent: an agent that ignores the run's reward functions is named, once."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.rollout.rewards.answer_scorer import Scorer
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.rewards.scored_agent import ScoredAgent

EXTRA = {"base_url": "http://proxy/sessions/s1/v1", "api_key": "key"}


class Own:
    """Scores its answer if the task says so."""

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        return await extra["score"]([], "4") if data["scores"] else 0.5


@pytest.mark.parametrize(("tasks", "warnings"), [([True, True], 0), ([False, False], 1), ([True, False], 1)])
async def test_an_agent_that_asks_for_no_score_is_named_once(
    tasks: list[bool], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = RewardConfig(function="exact", processes=1)
    async with RewardPool(config) as pool:
        agent = ScoredAgent(Own(), Scorer(config, pool))
        for scores in tasks:
            await agent.run({"scores": scores, "answer": "4"}, **EXTRA)
    assert sum('extra["score"]' in record.message for record in caplog.records) == warnings
