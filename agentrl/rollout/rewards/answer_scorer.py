"""Scores answers: calls every component's function, retries, applies weights, and names the rewards.

A component of weight 0 gives a number of the session, `reward/NAME`, in place of a reward. What a function says about
its judgement is a number `reward/NAME/WHAT`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.domain import answer_text
from agentrl.domain.schemas import Json
from agentrl.domain.session_stats import OF_REWARDS
from agentrl.errors import AgentRLError, root_cause
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
Per = Literal["session", "call"]
"""What a component judges."""


class RewardFailed(AgentRLError):
    """A reward could not be computed. The message names the component, the number of attempts and the last reason."""


class Judged(NamedTuple):
    """A function's value, who gave it, the answer that it has read (`function_value.answer_in`), and its stats."""

    value: Value
    source: str
    answer: str | None = None
    stats: Mapping[str, float] = {}


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

    def judges(self, per: Per) -> bool:
        """Whether a component judges this."""
        return any(one.per == per for one in self._config.functions.values())

    async def score(
        self,
        answer: Json,
        *,
        group_id: str = "",
        session_id: str = "",
        group_size: int = 1,
        per: Per | None = None,
    ) -> Score:
        """The weighted rewards of an answer, as `answer_of` builds it, by the components that judge a `per`; None: by
        all. Raises RewardFailed.

        Batched functions wait for the other answers of the group. What is judged is what the first function has read
        that reads answers, else the text. The values of components of weight 0 are measured (`episode_stats.measure`).
        """
        facts = await self._pool.facts()
        components = {name: one for name, one in self._config.functions.items() if per in (None, one.per)}
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
        judged = {name: call.result() for name, call in calls.items()}
        rewards = [
            reward
            for name, one in components.items()
            if one.weight
            for reward in _named(name, one.weight, judged[name])
        ]
        if not rewards and per != "call" and any(one.weight for one in components.values()):
            raise RewardFailed("no reward function returned a value for this answer")
        said = ((f"{name}/{what}", value) for name in components for what, value in judged[name].stats.items())
        shown = (one for name in components if not components[name].weight for one in _named(name, 1.0, judged[name]))
        numbers = [*said, *((one.name, one.value) for one in shown)]
        stats = {f"{OF_REWARDS}/{name}": value for name, value in numbers}
        text = answer_text.bounded(answer["completion"])
        read = next((one.answer for one in judged.values() if one.answer is not None), text)
        return Score(tuple(rewards), read or None, stats)

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
                found = zip(reply["values"], reply["answers"], reply["stats"], strict=True)
                source = component.function[:LONGEST_SOURCE]
                return [Judged(value_of(value), source, read, stats) for value, read, stats in found]
            except CallFailed as error:
                again = attempt <= self._config.retries and not error.final
                log.warning("reward %s, attempt %d: %s", name, attempt, error)
                if again:
                    continue
                if self._config.on_error is not None:
                    return [Judged(self._config.on_error, ON_ERROR)] * len(answers)
                raise RewardFailed(f"reward {name}: {error} (attempt {attempt})") from None


def _named(name: str, weight: float, judged: Judged) -> list[Reward]:
    """The weighted values of one component. Those of a mapping are called NAME.KEY."""
    values = judged.value if isinstance(judged.value, dict) else {} if judged.value is None else {"": judged.value}
    return [
        Reward(value=value * weight, name=".".join(part for part in (name, inner) if part), source=judged.source)
        for inner, value in values.items()
    ]
