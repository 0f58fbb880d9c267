"""A user that an upstream model plays. Its calls are recorded in the session, and never trained."""

from __future__ import annotations

from typing import Annotated

import openai
from openai import AsyncOpenAI
from pydantic import Field

from agentrl.configs.section import Positive, Section
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.tools.tool_result import OpenTools, ToolBroken, ToolContext, UserTurn

OPENING = "Hello! How can I help you?"
"""The system prompt of the user's model."""
PROMPT = """You play a person who talks to an assistant. Stay in this role, and write only what the person says.

The person's situation and wish:
{instruction}

Say one or two sentences at a time, and tell the assistant only what it needs next. Make up nothing that is not above.
When the wish is fulfilled, or cannot be, write {stop} and nothing else."""


class ModelUserEntry(Section):
    """A user that an upstream model plays."""

    model: str
    """The upstream's name in `proxy.upstreams`."""
    prompt: str = PROMPT
    """The system prompt of the user's model. Names in braces are fields of the task; `{stop}` is `stop`."""
    stop: Annotated[str, Field(min_length=1)] = "###STOP###"
    """The user ends the conversation by a message with this text."""
    max_tokens: Positive = 256
    """Tokens of one message."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """The temperature of the user's model; null: the upstream's own."""


class ModelUser:
    """The source of a user."""

    def __init__(self, entry: ModelUserEntry, name: str) -> None:
        self._entry, self._name = entry, name

    async def open(self, context: ToolContext) -> OpenTools:
        """The user of an episode. Raises UserError when the task lacks a field of the prompt."""
        try:
            prompt = self._entry.prompt.format_map({"stop": self._entry.stop, **context.task})
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"user.prompt: cannot be filled with the task's fields: {error!r}") from None
        extra = context.extra
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])

        async def respond(messages: list[Json]) -> UserTurn:
            return self._turn(await self._asked(client, seen_by_user(prompt, messages)))

        return OpenTools(name=self._name, tools=(), respond=respond)

    async def _asked(self, client: AsyncOpenAI, messages: list[Json]) -> str:
        entry, request = self._entry, {}
        if entry.temperature is not None:
            request["temperature"] = entry.temperature
        asked: Json = {"model": entry.model, "messages": messages, "max_tokens": entry.max_tokens, **request}
        try:
            reply = await client.chat.completions.create(**asked)
        except openai.APIError as error:
            raise ToolBroken(f"the user's model {entry.model!r} failed: {error}") from error
        text = reply.choices[0].message.content if reply.choices else None
        if not text:
            raise ToolBroken(f"the user's model {entry.model!r} said nothing")
        return text

    def _turn(self, text: str) -> UserTurn:
        over = self._entry.stop in text
        return UserTurn(text=text.replace(self._entry.stop, "").strip(), over=over)


def seen_by_user(prompt: str, messages: list[Json]) -> list[Json]:
    """The conversation with exchanged roles. Tools, and the assistant's instructions, are not part of it."""
    seen: list[Json] = [{"role": "system", "content": prompt}, {"role": "user", "content": OPENING}]
    for message in messages:
        text = message.get("content")
        if message["role"] in ("user", "assistant") and isinstance(text, str) and text.strip():
            seen.append({"role": "assistant" if message["role"] == "user" else "user", "content": text})
    return seen
