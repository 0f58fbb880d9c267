"""agentrl.rollout.rewards.scored_agent: an agent that ignores the run's reward functions is named, once."""

from __future__ import annotations

import asyncio
from pathlib import Path
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


async def test_a_greedy_episode_is_scored_alone_and_the_samples_of_its_group_are_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sizes.py").write_text("def score(prompts):\n    return [float(len(prompts))] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    config = RewardConfig(function="sizes:score", processes=1, batch_wait_s=30)
    async with RewardPool(config) as pool:
        agent = ScoredAgent(Own(), Scorer(config, pool))

        async def play(session_id: str, **extra: Any) -> float:
            base_url = f"http://proxy/sessions/{session_id}/v1"
            own = {"base_url": base_url, "api_key": "key", "group_id": "g", "group_size": 2} | extra
            return float((await agent.run({"scores": True}, **own)).value)

        greedy = await play("s2", is_baseline=True)  # it ends before any sample
        samples = await asyncio.wait_for(asyncio.gather(play("s0"), play("s1")), 20)
    assert [greedy, *samples] == [1.0, 2.0, 2.0]
