"""A ready-made agent with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.answering.task_messages import PROMPTS, messages_of
from agentrl.rollout.score import Result
from agentrl.rollout.tools.tool_entries import sources_of
from agentrl.rollout.tools.tool_limits import limits_of
from agentrl.rollout.tools.tool_loop import ToolLoop, overrides_of
from agentrl.rollout.tools.users.user_entries import user_of


class ToolAgent:
    """Lets the model use tools until it answers. The reward is the score of the answer and the rewards of the tools.

    `max_tokens` bounds what the model samples in an episode, `max_call_tokens` what it samples in one turn.
    """

    def __init__(
        self,
        *,
        tools: Sequence[object] = (),
        max_turns: int = 10,
        max_tokens: int | None = None,
        max_call_tokens: int | None = None,
        tool_timeout_s: float = 60.0,
        max_tool_chars: int = 4096,
        truncate: str = "middle",
        on_tool_error: str = "tell",
        parallel: int = 8,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        user: object = None,
        system: str | None = None,
        template: str | None = None,
        enable_thinking: bool | None = None,
        stop: list[str] | None = None,
    ) -> None:
        self.system, self.template = system, template
        limits = {"timeout_s": tool_timeout_s, "max_chars": max_tool_chars}
        self._limits = limits_of({**limits, "truncate": truncate, "on_error": on_tool_error}, "agent_args")
        self._user = None if user is None else user_of(user)
        self._loop: dict[str, Any] = {
            "tools": sources_of(tools),
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "limits": self._limits,
            "overrides": overrides_of(overrides or {}, self._limits),
            "parallel": parallel,
            "user": self._user,
            "call": PolicyCall(enable_thinking=enable_thinking, max_tokens=max_call_tokens, stop=stop),
        }
        ToolLoop({}, **self._loop)  # an invalid number is refused here

    def _opening(self, data: Json) -> list[Json]:
        """The first messages. Where there is a user, the task need not have a prompt."""
        if self._user is not None and self.template is None and not any(data.get(field) for field in PROMPTS):
            return [] if self.system is None else [{"role": "system", "content": self.system}]
        return messages_of(data, system=self.system, template=self.template)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run an episode. Raises UserError when nothing gives it a reward."""
        messages = self._opening(data)
        async with ToolLoop(extra, task=data, **self._loop) as loop:
            reply = await loop.run(messages)
            result = await loop.result(await extra["score"](loop.asked, reply) if "score" in extra else None)
        if not result.rewards:
            raise UserError("the episode has no reward: give the run a `reward`, or tools that have one")
        return result
