"""Gives an agent `extra["score"]`, which scores its answers with the run's reward functions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean, root_cause
from agentrl.rollout.agent import Agent, load_agent
from agentrl.rollout.episode_stats import measure
from agentrl.rollout.group_filter import load_accept
from agentrl.rollout.rewards.answer_scorer import Scorer
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.async_reward import pools_closed
from agentrl.rollout.rewards.call_answers import call_answers
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.score import Reward, Score, result_of
from agentrl.rollout.tools.mcp_tools import shared_servers_closed

log = logging.getLogger(__name__)
JUDGE = "judge"
"""The verifier whose argument `model` names an upstream."""


class ScoredAgent:
    """Runs another agent, whose `extra` has two more keys.

    `score(messages, reply)` returns the Score of a reply to `messages`; `turn` counts from 1. `wants_ids` says whether
    the reply should have token ids (`return_token_ids`).
    """

    def __init__(self, agent: Agent, scorer: Scorer) -> None:
        self._agent, self._scorer = agent, scorer
        self._warned = False

    async def run(self, data: Json, **extra: Any) -> Any:
        """Run an episode of the agent."""
        is_eval = bool(extra.get("is_eval"))
        session_id = extra["base_url"].partition("/sessions/")[2].partition("/")[0]
        is_alone = is_eval or bool(extra.get("is_baseline"))  # a greedy episode is no sample of its group
        group_id = session_id if is_alone else str(extra.get("group_id") or session_id)
        size = 1 if is_alone else int(extra.get("group_size", 1))
        about = {"is_eval": is_eval, "base_url": extra["base_url"], "api_key": extra["api_key"]}
        scored = False

        async def score(messages: Sequence[Any], reply: object, *, turn: int = 1, alone: bool = False) -> Score:
            nonlocal scored
            scored = True
            answer = answer_of(data, messages, reply, turn=turn, **about)
            found = await self._scorer.score(
                answer,
                group_id=group_id,
                session_id=session_id,
                group_size=1 if alone else size,
                per="session",
            )
            return _measured(found)

        try:
            result = await self._agent.run(data, **extra, score=score, wants_ids=await self._scorer.wants_ids())
            if self._scorer.judges("call"):
                result = result_of(result)
                if result.reject is None:
                    of_calls = await self._of_calls(data, extra, session_id, about)
                    result = replace(result, rewards=(*result.rewards, *of_calls))
            if not scored and not self._warned and self._scorer.judges("session"):
                self._warned = True
                log.warning(
                    'an episode ended without a call of extra["score"]: the run\'s reward functions were not asked'
                )
            return result
        finally:
            self._scorer.ended(group_id, session_id, size)

    async def _of_calls(self, data: Json, extra: Json, session_id: str, about: Json) -> list[Reward]:
        """The rewards of the session's main calls. Raises RewardFailed, and UserError without a trace."""
        url = f"{extra['base_url'].partition('/sessions/')[0]}/sessions/{session_id}/trace"
        found = await extra["http_client"].get(url, headers={"Authorization": f"Bearer {extra['api_key']}"})
        if not found.is_success:
            raise UserError(f"the session's calls cannot be read: {found.status_code}: {found.text[:300]}")
        judged = list(call_answers(data, found.json()["calls"], **about))
        try:
            async with asyncio.TaskGroup() as running:
                scores = [running.create_task(self._scorer.score(answer, per="call")) for _, answer in judged]
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        return [
            reward
            for (call_id, _), score in zip(judged, scores, strict=True)
            for reward in _measured(score.result()).of_call(call_id).rewards
        ]


def _measured(score: Score) -> Score:
    """The score, whose numbers are numbers of the running episode now."""
    for name, value in score.stats.items():
        measure(name, value)
    return score


def check_agent(config: RunConfig) -> None:
    """Load the agent, the reward functions and the filter of a run. Raises UserError when one cannot be loaded."""
    load_accept(config.rollout.accept)
    load_agent(config.agent, config.agent_args, scored=config.reward is not None)
    user = config.agent_args.get("user") if config.agent == "tool_agent" else None
    _check_upstream(config, user.get("model") if isinstance(user, Mapping) else None, "agent_args.user.model")
    if config.reward is not None:
        for name, one in config.reward.functions.items():
            _check_upstream(
                config, one.args.get("model") if one.function == JUDGE else None, f"reward {name}: args.model"
            )
        asyncio.run(_load_rewards(config.reward))


def _check_upstream(config: RunConfig, model: object, field: str) -> None:
    """Raise UserError unless `model` is None or an upstream of the run."""
    if model is not None and model not in config.proxy.upstreams:
        near = did_you_mean(str(model), config.proxy.upstreams) if config.proxy.upstreams else ""
        raise UserError(f"{field}: there is no upstream {model!r} in proxy.upstreams{near}")


async def _load_rewards(config: RewardConfig) -> None:
    async with RewardPool(config) as pool:
        await pool.facts()


@asynccontextmanager
async def agent_of(config: RunConfig) -> AsyncIterator[Agent]:
    """The agent of a run, with the processes of its reward functions, until the block ends. Raises UserError."""
    agent = load_agent(
        config.agent,
        config.agent_args,
        scored=config.reward is not None,
        turn_discount=config.rollout.turn_discount,
    )
    if config.reward is None:
        async with pools_closed(), shared_servers_closed():
            yield agent
        return
    async with pools_closed(), shared_servers_closed(), RewardPool(config.reward) as pool:
        yield ScoredAgent(agent, Scorer(config.reward, pool))
