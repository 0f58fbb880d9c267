"""An agent that asks the model once and scores its answer."""

from __future__ import annotations

from typing import Any

from agentrl.domain.schemas import Json
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.answering.task_messages import messages_of
from agentrl.rollout.score import Score


class SingleTurn:
    """The task's prompt is the conversation; the reward is the score of the model's answer."""

    def __init__(
        self,
        *,
        system: str | None = None,
        template: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        self.system, self.template = system, template
        self.call = PolicyCall(enable_thinking=enable_thinking, max_tokens=max_tokens, stop=stop)

    async def run(self, data: Json, **extra: Any) -> Score:
        """Answer the task once."""
        messages = messages_of(data, system=self.system, template=self.template)
        reply = await self.call(messages, extra)
        score: Score = await extra["score"](messages, reply)
        return score
