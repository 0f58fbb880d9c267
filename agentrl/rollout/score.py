"""Rewards as an agent returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.errors import UserError

DEFAULT_NAME = "reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """One reward of a session, or of the model call `interaction_id`."""

    value: float
    interaction_id: str | None = None
    name: str = DEFAULT_NAME
    source: str = "agent"


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one answer, as `extra["score"]` returns them. An agent may return it from `run`."""

    rewards: tuple[Reward, ...]

    @property
    def value(self) -> float:
        """The sum of the rewards."""
        return sum(reward.value for reward in self.rewards)

    def scaled(self, factor: float) -> Score:
        """The same rewards times `factor`."""
        return Score(tuple(replace(reward, value=reward.value * factor) for reward in self.rewards))

    def of_call(self, interaction_id: str) -> Score:
        """The same rewards for one model call, by its completion id, instead of for the session."""
        return Score(tuple(replace(reward, interaction_id=interaction_id) for reward in self.rewards))


def rewards_of(result: object) -> list[Reward]:
    """Convert the result of `run` to rewards. Raises UserError."""
    if result is None:
        return []
    if isinstance(result, Score):
        return list(result.rewards)
    if isinstance(result, Mapping):
        return [Reward(value=_finite(value), interaction_id=str(key)) for key, value in result.items()]
    return [Reward(value=_finite(result))]


def _finite(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"an agent must return a number, {{completion_id: number}}, a score or None, got {value!r}"
        ) from None
    if not math.isfinite(number):
        raise UserError(f"an agent returned the reward {number}")
    return number
