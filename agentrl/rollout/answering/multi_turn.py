"""An agent that tells the model that its answer was wrong, and asks again."""

from __future__ import annotations

from typing import Any

import openai

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.answering.task_messages import messages_of
from agentrl.rollout.score import Result, Score

FEEDBACK = "That answer is wrong, or it is not in the expected form. Read the question again and give a new answer."


class MultiTurn:
    """Asks until an answer's score reaches `right`, at most `max_turns` times.

    The reward is the last answer's score times `turn_discount` for each turn after the first.
    """

    def __init__(
        self,
        *,
        max_turns: int = 3,
        turn_discount: float = 1.0,
        right: float = 1.0,
        feedback: str = FEEDBACK,
        system: str | None = None,
        template: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        if max_turns < 1:
            raise UserError(f"agent_args.max_turns: must be at least 1, got {max_turns}")
        if not 0 <= turn_discount <= 1:
            raise UserError(f"agent_args.turn_discount: must be from 0 to 1, got {turn_discount:g}")
        self.max_turns, self.turn_discount, self.right, self.feedback = max_turns, turn_discount, right, feedback
        self.system, self.template = system, template
        self.call = PolicyCall(enable_thinking=enable_thinking, max_tokens=max_tokens, stop=stop)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Answer the task until it is right, or until a limit ends the episode."""
        messages = messages_of(data, system=self.system, template=self.template)
        score: Score | None = None
        turn = 0
        while turn < self.max_turns and (score is None or score.value < self.right):
            try:
                reply = await self.call(messages, extra)
            except openai.BadRequestError as error:
                if score is None or error.code != "context_length_exceeded":
                    raise
                break  # no room for another turn
            turn += 1
            score = await extra["score"](messages, reply, turn=turn, alone=True)
            said = reply.choices[0].message.model_dump(exclude_none=True)
            messages = [*messages, said, {"role": "user", "content": self.feedback}]
        assert score is not None
        last = score.scaled(self.turn_discount ** (turn - 1))
        return Result(rewards=last.rewards, answer=last.answer, truncated=score.value < self.right)
