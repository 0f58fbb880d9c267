"""The model call of the ready-made agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from agentrl.domain.schemas import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCall:
    """Parameters of a call; None: the model's own.

    `enable_thinking` switches thinking on or off where the model's format can. `model` may also be an upstream's name.
    """

    enable_thinking: bool | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    model: str = "default"

    async def __call__(
        self, messages: list[Json], extra: Json, *, tools: Sequence[Json] = (), at_most: int | None = None
    ) -> ChatCompletion:
        """Ask the policy. `tools` it may call; `at_most` is a further bound of the answer's tokens."""
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        request: Json = {"model": self.model, "messages": messages}
        longest = min((n for n in (self.max_tokens, at_most) if n is not None), default=None)
        request |= {k: v for k, v in (("max_tokens", longest), ("stop", self.stop)) if v is not None}
        if tools:
            request["tools"] = list(tools)
        more: Json = {}
        if self.enable_thinking is not None:
            more["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        if extra.get("wants_ids"):
            more["return_token_ids"] = True
        reply: ChatCompletion = await client.chat.completions.create(**request, extra_body=more)
        return reply
