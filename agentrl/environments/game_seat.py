"""One player of a game: a conversation in which observations are user messages, and moves are the model's answers."""

from __future__ import annotations

import openai

from agentrl.domain.schemas import Json
from agentrl.rollout.answering.policy_call import PolicyCall


class OutOfRoom(Exception):
    """The conversation is as long as the model's context: there is no room for another move."""


class Seat:
    """A seat whose calls go to the session of `extra`."""

    def __init__(self, call: PolicyCall, extra: Json, system: str | None = None) -> None:
        self._call, self._extra = call, extra
        self._messages: list[Json] = [] if system is None else [{"role": "system", "content": system}]

    async def move(self, observation: str) -> str:
        """Show what happened and get the text of the next move. Raises OutOfRoom."""
        self._messages.append({"role": "user", "content": observation})
        try:
            reply = await self._call(self._messages, self._extra)
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            raise OutOfRoom from error
        self._messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return reply.choices[0].message.content or ""
