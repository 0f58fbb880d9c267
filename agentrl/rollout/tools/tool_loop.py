"""The loop of a model and its tools.

    messages ─► model ─┬─ tool calls ─► toolbox ─► one message per call, in the order of the calls ─► model …
                       └─ an answer  ─► the end, or the user, who answers ─► model …

It ends with an answer, or when the user ends it; after a tool's `end`; and when the turns, the tokens or the context
are spent. `stopped` says which. The calls of the last turn are executed too, so that what they do counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import openai
from openai.types.chat import ChatCompletion

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.score import Result, Reward, Score, finite
from agentrl.rollout.tools.tool_entries import sources_of
from agentrl.rollout.tools.tool_limits import ToolLimits, limits_of
from agentrl.rollout.tools.tool_result import ToolContext
from agentrl.rollout.tools.toolbox import Toolbox
from agentrl.rollout.tools.users.user_entries import user_of

Stopped = Literal["answered", "ended", "max_turns", "max_tokens", "context_length"]
LIMITS = ("max_turns", "max_tokens", "context_length")
"""Those that end an episode before its own end."""


class ToolLoop:
    """Runs a model with tools. `async with` creates the tools, and releases them at the end of its block.

    `extra` is what `run` got from agentrl; `task` is the task, for tools that use it. `tools` are functions with
    `@tool`, classes or objects with such methods, and entries as in a config. `user` answers the model when it calls no
    tool. `max_tokens` bounds the tokens that the model samples in all its turns.
    """

    def __init__(
        self,
        extra: Mapping[str, Any],
        tools: Sequence[object] = (),
        *,
        task: Json | None = None,
        max_turns: int = 10,
        max_tokens: int | None = None,
        limits: ToolLimits | None = None,
        overrides: Mapping[str, Mapping[str, Any] | ToolLimits] | None = None,
        parallel: int = 8,
        call: PolicyCall | None = None,
        user: object = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("max_tokens", max_tokens), ("parallel", parallel)):
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")
        self._extra, self._call, self._parallel = dict(extra), call or PolicyCall(), parallel
        self._sources, self._limits = sources_of(tools), limits or ToolLimits()
        self._sources += [] if user is None else [user_of(user)]
        self._overrides = overrides_of(overrides or {}, self._limits)
        self._context = ToolContext(task=task or {}, extra=self._extra, episode_id=episode_id(extra))
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._box: Toolbox | None = None
        self._steps: dict[tuple[str, str], float] = defaultdict(float)
        self.messages: list[Json] = []
        self.asked: list[Json] = []
        self.reply: ChatCompletion | None = None
        self.stopped: Stopped | None = None
        self.turns, self.tokens = 0, 0

    async def __aenter__(self) -> Self:
        self._box = Toolbox(
            self._sources, self._context, limits=self._limits, overrides=self._overrides, parallel=self._parallel
        )
        await self._box.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._box is not None
        await self._box.release()

    @property
    def text(self) -> str:
        """The text of the last reply."""
        return (self.reply and self.reply.choices[0].message.content) or ""

    async def run(self, messages: Sequence[Json]) -> ChatCompletion:
        """Let the model go on from `messages` until it stops. Returns its last reply.

        Afterwards `messages` is the whole conversation, and `asked` the part of it that the last reply answers.
        """
        if self._box is None:
            raise UserError("ToolLoop: use it in `async with ToolLoop(…) as loop`")
        self.messages, self.stopped = list(messages), None
        if all(message["role"] in ("system", "developer") for message in messages):
            self.stopped = await self._heard(self._box, None)  # the user opens the conversation
        while self.stopped is None:
            self.stopped = self._spent() or await self._turn(self._box)
        if self.reply is None:
            raise UserError("ToolLoop: the episode ended before the model's first turn")
        return self.reply

    def _spent(self) -> Stopped | None:
        if self.turns >= self._max_turns:
            return "max_turns"
        return "max_tokens" if self._max_tokens is not None and self.tokens >= self._max_tokens else None

    async def _turn(self, box: Toolbox) -> Stopped | None:
        left = None if self._max_tokens is None else self._max_tokens - self.tokens
        try:
            reply = await self._call(self.messages, self._extra, tools=box.schemas, at_most=left)
        except openai.BadRequestError as error:
            if self.reply is None or error.code != "context_length_exceeded":
                raise
            return "context_length"
        said = reply.choices[0].message
        self.asked, self.reply = self.messages, reply
        self.turns += 1
        self.tokens += reply.usage.completion_tokens if reply.usage else 0
        self.messages = [*self.messages, said.model_dump(exclude_none=True)]
        if not said.tool_calls:
            return await self._heard(box, reply.id)
        calls: list[Any] = list(said.tool_calls)
        results = await box.call_all(calls, self.messages)
        for call, result in zip(calls, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
            self._credit(reply.id, call.function.name, result.reward)
        return "ended" if any(result.end for result in results) else None

    async def _heard(self, box: Toolbox, completion_id: str | None) -> Stopped | None:
        """Let the user answer the model, if there is one."""
        if (heard := await box.respond(self.messages)) is None:
            return "answered" if completion_id is not None else None
        name, turn = heard
        if turn.text or not turn.over:
            self.messages = [*self.messages, {"role": "user", "content": turn.text}]
        if completion_id is not None:
            self._credit(completion_id, name, turn.reward)
        return "ended" if turn.over else None

    def _credit(self, completion_id: str, name: str, reward: float | None) -> None:
        if reward is not None:
            self._steps[completion_id, name] += reward

    async def rewards(self) -> tuple[Reward, ...]:
        """The rewards of the tools: of single model calls, then of the episode. Each is named after its tool."""
        if self._box is None:
            raise UserError("ToolLoop: use it in `async with ToolLoop(…) as loop`")
        found: list[tuple[str | None, str, float]] = [
            (call, name, value) for (call, name), value in self._steps.items()
        ]
        found += [(None, name, value) for name, value in (await self._box.rewards()).items()]
        weighed = [(call, name, value, self._box.limits_of(name).reward_weight) for call, name, value in found]
        return tuple(
            Reward(value=value * weight, interaction_id=call, name=name, source=self._box.source_of(name))
            for call, name, value, weight in weighed
            if weight
        )

    async def result(self, score: float | Score | None = None) -> Result:
        """What `run` of an agent may return: `score`, and the rewards of the tools."""
        own = () if score is None else score.rewards if isinstance(score, Score) else (Reward(value=finite(score)),)
        answer = score.answer if isinstance(score, Score) else None
        return Result(rewards=(*own, *await self.rewards()), answer=answer, truncated=self.stopped in LIMITS)


def overrides_of(given: Mapping[str, Mapping[str, Any] | ToolLimits], base: ToolLimits) -> dict[str, ToolLimits]:
    """The limits of single tools. What one does not say is as in `base`. Raises UserError."""
    return {
        name: one if isinstance(one, ToolLimits) else limits_of(dict(one), f"overrides.{name}", base)
        for name, one in given.items()
    }


def episode_id(extra: Mapping[str, Any]) -> str:
    """The id of the session."""
    return str(extra.get("base_url", "")).partition("/sessions/")[2].partition("/")[0]
