"""`ArealOpenAI(engine, tokenizer)`: an OpenAI client for one episode, which keeps the rewards of its calls.

client.chat.completions.create(…)  ──► the session's URL ──► recorded by the proxy
…(stream=True)                     ──► known from its first chunk on, and read to its end
client.set_reward(id, 1.0)         ──► kept here ──► export_interactions() ──► the result of arun_episode
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses
from openai.types.chat import ChatCompletion

from agentrl.areal.streamed_call import StreamedCall
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.workflows.session_engine import SessionEngine

STYLES = ("concat", "individual")


@dataclass
class Interaction:
    """One model call: its messages or input, its response, and its reward; None: no reward of its own.

    The response of a streamed call is None until its last chunk has arrived.
    """

    interaction_id: str
    messages: Any
    response: Any
    reward: float | None = None

    @property
    def conversation(self) -> list[Any]:
        """The messages or items of the call, and those of its answer, once there is one."""
        if self.response is None:
            return list(self.messages)
        chat = hasattr(self.response, "choices")
        answer = [self.response.choices[0].message] if chat else self.response.output
        return [*self.messages, *map(_plain, answer)]


@dataclass
class _Calls:
    """The calls of an episode, oldest first."""

    made: dict[str, Interaction] = field(default_factory=dict)

    def add(self, call_id: str, messages: Any, response: Any = None) -> None:
        self.made[call_id] = Interaction(call_id, messages, response)

    def answered(self, call_id: str, response: Any) -> None:
        """A streamed call has its whole response, or None: it failed, and is no call of the episode."""
        if response is None:
            del self.made[call_id]
        else:
            self.made[call_id].response = response

    def leaves(self) -> dict[str, Interaction]:
        """The calls that no later call extends by its messages."""
        inner: set[str] = set()
        earlier: list[tuple[list[Any], str]] = []
        for call_id, call in self.made.items():
            above = [one for one in earlier if call.messages[: len(one[0])] == one[0]]
            if above:
                inner.add(max(above, key=lambda one: len(one[0]))[1])
            earlier.append((call.conversation, call_id))
        return {call_id: call for call_id, call in self.made.items() if call_id not in inner}


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
        """The calls with their rewards, which `arun_episode` returns: all of them with `individual`; with `concat` the
        last of each conversation, so that rewards of earlier calls do not count. Raises UserError for another style.
        """
        if style not in STYLES:
            raise UserError(f"export_interactions: style {style!r} does not exist{did_you_mean(style, STYLES)}")
        return self.calls.leaves() if style == "concat" else dict(self.calls.made)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **request: Any) -> Any:
        client = self._client
        assert isinstance(client, ArealOpenAI)
        messages = _copied(request.get("messages"))
        response = await super().create(**{"model": "default", **request})
        if request.get("stream"):
            return await _streamed(client, response, messages)
        client.calls.add(response.id, messages, response)
        return response


class _Responses(AsyncResponses):
    async def create(self, **request: Any) -> Any:
        client = self._client
        assert isinstance(client, ArealOpenAI)
        if request.get("stream"):
            raise UserError("ArealOpenAI: responses.create(stream=True) is not supported; stream chat.completions")
        items = _copied(request.get("input"))
        response = await super().create(**{"model": "default", **request})
        client.calls.add(response.id, items, response)
        return response


async def _streamed(client: ArealOpenAI, stream: Any, messages: list[Any]) -> StreamedCall:
    """The stream of a call that is known from its first chunk on, and is read to its end before the episode ends."""
    call_id = ""

    def done(response: ChatCompletion | None) -> None:
        if call_id:
            client.calls.answered(call_id, response)

    call = StreamedCall(stream, done)
    call_id = (await call.first()).id
    client.calls.add(call_id, messages)
    client.engine.before_end(call.read_rest)
    return call


def _copied(given: Any) -> list[Any]:
    """The messages or items of a request as they are now: agents change their list after the call."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or ()
    return [_plain(one) for one in items]


def _plain(message: Any) -> Any:
    """A message or an item, an object of the SDK or a mapping, as a mapping without null fields."""
    given = message.model_dump() if hasattr(message, "model_dump") else message
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else given
