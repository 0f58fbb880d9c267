"""A decoded request, the same for every dialect: messages and tools are in the shape of Chat Completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.domain.schemas import Json


@dataclass(frozen=True, slots=True)
class Named:
    """A `tool_choice` that forces one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A decoded request. `sampling` and `constraint` hold the caller's values, under SGLang's names."""

    model: str | None = None
    messages: list[Json] = field(default_factory=list)  # validated; empty beside `prompts`
    prompts: list[str | list[int]] = field(default_factory=list)  # raw prompts: Completions
    previous_id: str | None = None  # the call whose conversation `messages` continue: Responses
    has_instructions: bool = False  # the first message is for this call: calls that continue it drop it
    tools: list[Json] | None = None
    loaded: list[Json] = field(default_factory=list)  # callable tools that messages define; they are not in `tools`
    left_out: list[str] = field(default_factory=list)  # tools that run at a provider; the prompt leaves them out
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    sampling: Json = field(default_factory=dict)  # temperature, top_p, top_k, penalties, logit_bias, …
    template_options: Json = field(default_factory=dict)  # chat_template_kwargs
    thinks: bool | None = None  # whether another parameter asks for reasoning; None: not given
    constraint: Json = field(default_factory=dict)  # a grammar: {"json_schema": "…"}
    seed: int | None = None
    max_tokens: int | None = None
    clips: bool = False  # lower `max_tokens` to what fits in the context
    stop: list[str] = field(default_factory=list)
    n: int = 1  # answers per prompt
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    kept: Json | None = None  # the body's settings, recorded for GET of the response: Responses
    wire: Any = None  # the dialect's own body, for its encoder
    size: int = 0  # bytes of the body

    @property
    def callable_tools(self) -> list[Json] | None:
        """The tools that an answer may call."""
        return [*(self.tools or []), *self.loaded] or None

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n * max(1, len(self.prompts))
