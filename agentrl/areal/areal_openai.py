"""`ArealOpenAI(engine, tokenizer)`: an OpenAI client for one episode, which keeps the rewards of its calls.

client.chat.completions.create(…)  ──► the session's URL ──► recorded by the proxy
client.set_reward(id, 1.0)         ──► kept here ──► export_interactions() ──► the result of arun_episode
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.workflows.session_engine import SessionEngine

STYLES = ("concat", "individual")


@dataclass
class Interaction:
    """One model call: its messages or input, its response, and its reward; None: no reward of its own."""

    interaction_id: str
    messages: Any
    response: Any
    reward: float | None = None


@dataclass
class _Calls:
    """The calls of an episode, oldest first."""

    made: dict[str, Interaction] = field(default_factory=dict)

    def add(self, response: Any, messages: Any) -> None:
        self.made[response.id] = Interaction(response.id, messages, response)


class ArealOpenAI(AsyncOpenAI):
    """An `AsyncOpenAI` of one episode. Other options of AReaL's client, such as `tool_call_parser`, have no effect: the
    proxy renders and parses as the run's configuration says.
    """

    def __init__(self, engine: SessionEngine, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(base_url=engine.base_url, api_key=engine.api_key, http_client=engine.http)
        self.engine, self.tokenizer = engine, tokenizer
        self.calls = _Calls()

    @cached_property
    def chat(self) -> AsyncChat:
        """Chat Completions."""
        return _Chat(self)

    @cached_property
    def responses(self) -> AsyncResponses:
        """Responses."""
        return _Responses(self)

    def get_interaction(self, id: str) -> Interaction | None:
        """A call of this episode."""
        return self.calls.made.get(id)

    def set_reward(self, id: str, reward: float) -> None:
        """Reward a call, by the id of its response. Raises UserError for an unknown id."""
        if id not in self.calls.made:
            raise UserError(f"set_reward: this episode has no call {id!r}{did_you_mean(id, self.calls.made)}")
        if not math.isfinite(reward):
            raise UserError(f"set_reward: {reward} is not finite")
        self.calls.made[id].reward = float(reward)

    def set_last_reward(self, reward: float) -> None:
        """Reward the newest call. Raises UserError before the first call."""
        if not self.calls.made:
            raise UserError("set_last_reward: this episode has made no call")
        self.set_reward(next(reversed(self.calls.made)), reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Check that the run discounts by `turn_discount`: the trainer applies it to the recorded rewards.

        Raises UserError when `rollout.turn_discount` differs.
        """
        if turn_discount != self.engine.turn_discount:
            raise UserError(
                f"apply_reward_discount({turn_discount:g}): the trainer discounts the recorded rewards by "
                f"rollout.turn_discount, which is {self.engine.turn_discount:g}: set it to {turn_discount:g}"
            )

    def export_interactions(self, style: Literal["concat", "individual"] = "concat") -> dict[str, Interaction]:
        """The calls with their rewards, which `arun_episode` returns. Both styles give the same: the proxy keeps calls
        that extend each other as one trajectory. Raises UserError for another style.
        """
        if style not in STYLES:
            raise UserError(f"export_interactions: style {style!r} does not exist{did_you_mean(style, STYLES)}")
        return dict(self.calls.made)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **request: Any) -> Any:
        return await _recorded(super().create, self._client, request, "messages")


class _Responses(AsyncResponses):
    async def create(self, **request: Any) -> Any:
        return await _recorded(super().create, self._client, request, "input")


async def _recorded(create: Any, client: Any, request: dict[str, Any], prompt: str) -> Any:
    if request.get("stream"):
        raise UserError("ArealOpenAI: stream=True is not supported; use AsyncOpenAI with the engine's base_url")
    response = await create(**{"model": "default", **request})
    client.calls.add(response, request.get(prompt))
    return response
