"""The result of an agent: rewards, and which of its tokens train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.domain.verdicts import Range
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
    answer: str | None = None
    """What was judged: the verifier's reading of the answer, else its text."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the judgements, by name, which are no rewards."""

    @property
    def value(self) -> float:
        """The sum of the rewards."""
        return sum(reward.value for reward in self.rewards)

    def scaled(self, factor: float) -> Score:
        """The same rewards times `factor`."""
        return replace(self, rewards=tuple(replace(one, value=one.value * factor) for one in self.rewards))

    def of_call(self, interaction_id: str) -> Score:
        """The same rewards for one model call, by its completion id, instead of for the session."""
        return replace(self, rewards=tuple(replace(one, interaction_id=interaction_id) for one in self.rewards))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of an episode, which an agent may return from `run`.

    `trained_tokens` maps completion ids to ranges of output tokens; None: all tokens of all calls train. `reject` is
    the reason why nothing of the episode trains. `answer` is what the episode answered: equal answers of an
    evaluation's samples vote together. `stats` are numbers of the episode, by name, whose means are metrics.
    `truncated` says that a limit ended the episode, for example one of its turns, and not the task itself.
    """

    rewards: tuple[Reward, ...] = ()
    trained_tokens: Mapping[str, Sequence[Range]] | None = None
    reject: str | None = None
    answer: str | float | None = None
    stats: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


def result_of(found: object) -> Result:
    """Convert what `run` returned. Raises UserError."""
    if found is None:
        return Result()
    if isinstance(found, Result):
        if not isinstance(found.answer, str | int | float | None):
            raise UserError(f"Result: answer must be a text or a number, got {type(found.answer).__name__}")
        return found
    if isinstance(found, Score):
        return Result(rewards=found.rewards, answer=found.answer)
    if isinstance(found, Mapping):
        rewards = (Reward(value=finite(value), interaction_id=str(key)) for key, value in found.items())
        return Result(rewards=tuple(rewards))
    return Result(rewards=(Reward(value=finite(found)),))


def finite(value: object) -> float:
    """A reward's value. Raises UserError."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"an agent must return a number, {{completion_id: number}}, a score or None, got {value!r}"
        ) from None
    if not math.isfinite(number):
        raise UserError(f"an agent returned the reward {number}")
    return number
