"""The bodies of a Messages request and of a request to count its tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from agentrl.engine.sampling_params import MAX_TOP_K
from agentrl.proxy.dialects.anthropic.message_types import (
    CacheControl,
    Message,
    Name,
    Text,
    TurnConfig,
    Typed,
)


class ChooseNone(Typed, tag="none"):
    pass


class _Choose(Typed):
    disable_parallel_tool_use: bool | None = None


class ChooseAuto(_Choose, tag="auto"):
    pass


class ChooseAny(_Choose, tag="any"):
    pass


class ChooseTool(_Choose, tag="tool", kw_only=True):
    name: Name


Choice = ChooseAuto | ChooseAny | ChooseTool | ChooseNone


class NoThinking(Typed, tag="disabled"):
    pass


class ThinkingBetweenTools(Typed, tag="between_tools"):
    pass


class _Thinks(Typed):
    display: Literal["summarized", "omitted", "updates"] | None = None  # thinking is sent in full, or not at all
    block_binding: dict[str, Any] | None = None  # agentrl does not sign thinking


class AdaptiveThinking(_Thinks, tag="adaptive"):
    pass


class ThinkingEnabled(_Thinks, tag="enabled", kw_only=True):
    budget_tokens: Annotated[int, Meta(ge=1)]


class JsonSchema(Typed, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(TurnConfig):
    format: JsonSchema | None = None
    task_budget: dict[str, Any] | None = None  # accepted without effect


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[dict[str, Any]] | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that a prompt is made of."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingEnabled | AdaptiveThinking | ThinkingBetweenTools | NoThinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchema | None = None
    context_management: ContextManagement | None = None
    # Accepted without effect.
    cache_control: CacheControl | None = None
    speed: str | None = None
    billing_policy: dict[str, Any] | None = None
    # Refused unless empty.
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of a request."""

    REFUSED: ClassVar[tuple[str, ...]] = ("compaction", "container", "mcp_servers", "thread")

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=MAX_TOP_K)] | None = None
    # Accepted without effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    fallbacks: Any = None  # for requests that a model declines
    fallback_credit_token: Any = None
    # Refused, with the error code that lets the SDK's tool runner continue without a thread.
    thread: dict[str, Any] | bool | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether thinking blocks have their text."""
        return getattr(self.thinking, "display", None) != "omitted"
