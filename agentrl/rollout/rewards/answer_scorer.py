"""Scores answers: calls every component's function, retries, applies weights, and names the rewards."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import NamedTuple

from agentrl.configs.episodes.reward_config import RewardComponent, RewardConfig
from agentrl.domain import answer_text
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, root_cause
from agentrl.rollout.episode_stats import measure
from agentrl.rollout.rewards.function_value import Value, value_of
from agentrl.rollout.rewards.group_batches import GroupBatches
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.rewards.reward_process import CallFailed
from agentrl.rollout.score import Reward, Score

log = logging.getLogger(__name__)
ON_ERROR = "on_error"
"""Source of a value that replaces one that could not be computed."""
LONGEST_SOURCE = 100
"""Characters that the proxy accepts."""


class RewardFailed(AgentRLError):
    """A reward could not be computed. The message names the component, the number of attempts and the last reason."""


class Judged(NamedTuple):
    """A function's value, who gave it, and the answer that it has read (`function_value.answer_in`)."""

    value: Value
    source: str
    answer: str | None = None


class Scorer:
    """Scores answers with the functions of a configuration."""

    def __init__(self, config: RewardConfig, pool: RewardPool) -> None:
        self._config, self._pool = config, pool
        self._batches = {
            name: GroupBatches(partial(self._call, name), config.batch_wait_s) for name in config.functions
        }

    async def wants_ids(self) -> bool:
        """Whether a function has a parameter for token ids."""
        return any(fact["wants_ids"] for fact in (await self._pool.facts()).values())

    async def score(self, answer: Json, *, group_id: str = "", session_id: str = "", group_size: int = 1) -> Score:
        """The weighted rewards of an answer, as `answer_of` builds it. Raises RewardFailed.

        Batched functions wait for the other answers of the group. What is judged is what the first function has read
        that reads answers, else the text. The values of components of weight 0 are measured (`episode_stats.measure`).
        """
        facts, components = await self._pool.facts(), self._config.functions
        calls = {}
        try:
            async with asyncio.TaskGroup() as running:
                for name in components:
                    together = facts[name]["batched"] and group_size > 1
                    judging = (
                        self._batches[name].value(answer, group_id, session_id, group_size)
                        if together
                        else self._alone(name, answer)
                    )
                    calls[name] = running.create_task(judging)
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        rewards: list[Reward] = []
        for name, component in components.items():
            found = _named(name, component, calls[name].result())
            if component.weight:
                rewards += found
            else:
                for one in found:
                    measure(one.name, one.value)
        if not rewards:
            raise RewardFailed("no reward function returned a value for this answer")
        read = (calls[name].result().answer for name in components)
        text = answer_text.bounded(answer["completion"])
        return Score(tuple(rewards), next((one for one in read if one is not None), text) or None)

    def ended(self, group_id: str, session_id: str, group_size: int) -> None:
        """Record that a session has ended, so that batches do not wait for its answer."""
        for batches in self._batches.values():
            batches.left(group_id, session_id, group_size)

    async def _alone(self, name: str, answer: Json) -> Judged:
        return (await self._call(name, [answer]))[0]

    async def _call(self, name: str, answers: list[Json]) -> list[Judged]:
        """Call a function until it returns values, at most `retries` times again. Raises RewardFailed."""
        component = self._config.functions[name]
        timeout_s, attempt = component.timeout_s or self._config.timeout_s, 0
        while True:
            attempt += 1
            try:
                reply = await self._pool.call(name, answers, timeout_s)
                found, source = zip(reply["values"], reply["answers"], strict=True), component.function[:LONGEST_SOURCE]
                return [Judged(value_of(value), source, read) for value, read in found]
            except CallFailed as error:
                again = attempt <= self._config.retries and not error.final
                log.warning("reward %s, attempt %d: %s", name, attempt, error)
                if again:
                    continue
                if self._config.on_error is not None:
                    return [Judged(self._config.on_error, ON_ERROR)] * len(answers)
                raise RewardFailed(f"reward {name}: {error} (attempt {attempt})") from None


def _named(name: str, component: RewardComponent, judged: Judged) -> list[Reward]:
    """The weighted rewards of one component; unweighted values if the weight is 0. Those of a mapping are called
    NAME.KEY.
    """
    values = judged.value if isinstance(judged.value, dict) else {} if judged.value is None else {"": judged.value}
    return [
        Reward(
            value=value * (component.weight or 1.0),
            name=".".join(part for part in (name, inner) if part),
            source=judged.source,
        )
        for inner, value in values.items()
    ]
