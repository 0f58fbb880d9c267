"""A decoded request, the same for every dialect: messages and tools are in the shape of Chat Completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.domain.schemas import Json


@dataclass(frozen=True, slots=True)
class Named:
    """`tool_choice`: this tool and no other."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A decoded request. `sampling` and `constraint` hold only what the caller asked for, in SGLang's words."""

    model: str | None = None
    messages: list[Json] = field(default_factory=list)  # validated; empty beside `prompts`
    prompts: list[str | list[int]] = field(default_factory=list)  # raw ones: Completions
    previous_id: str | None = None  # the call whose conversation `messages` go on with: Responses
    has_instructions: bool = False  # the first message is of this call alone: what follows `previous_id` drops it
    tools: list[Json] | None = None
    loaded: list[Json] = field(default_factory=list)  # tools that messages define: callable, not in the list
    left_out: list[str] = field(default_factory=list)  # tools that a provider would run: the policy is not told of them
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    sampling: Json = field(default_factory=dict)  # temperature, top_p, top_k, penalties, logit_bias, …
    template_options: Json = field(default_factory=dict)  # chat_template_kwargs
    thinks: bool | None = None  # whether the policy is asked to think, by another parameter; None: not said
    constraint: Json = field(default_factory=dict)  # of the grammar: {"json_schema": "…"}
    seed: int | None = None
    max_tokens: int | None = None
    clips: bool = False  # of `max_tokens` as many as the context has room for are enough
    stop: list[str] = field(default_factory=list)
    n: int = 1  # answers to each prompt
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    kept: Json | None = None  # of the body, for who asks for the response once more: Responses
    wire: Any = None  # the dialect's own body: what its encoder needs besides
    size: int = 0  # bytes of its body

    @property
    def callable_tools(self) -> list[Json] | None:
        """What an answer may call."""
        return [*(self.tools or []), *self.loaded] or None

    @property
    def choices(self) -> int:
        """How many answers there will be."""
        return self.n * max(1, len(self.prompts))
