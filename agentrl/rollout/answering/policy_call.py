"""The model call of the ready-made agents."""

from __future__ import annotations

from dataclasses import dataclass

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from agentrl.domain.schemas import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCall:
    """Parameters of a call; None: the model's own.

    `enable_thinking` switches thinking on or off where the model's format can.
    """

    enable_thinking: bool | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None

    async def __call__(self, messages: list[Json], extra: Json) -> ChatCompletion:
        """Ask the policy."""
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        request: Json = {"model": "default", "messages": messages}
        request |= {k: v for k, v in (("max_tokens", self.max_tokens), ("stop", self.stop)) if v is not None}
        more: Json = {}
        if self.enable_thinking is not None:
            more["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        if extra.get("wants_ids"):
            more["return_token_ids"] = True
        reply: ChatCompletion = await client.chat.completions.create(**request, extra_body=more)
        return reply
