"""The body of a Responses request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from agentrl.proxy.dialects.neutral_fields import OF_RESPONSES, Table
from agentrl.proxy.dialects.sampling_fields import TopLogprobs


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None  # "none" turns reasoning off; other values have no effect
    summary: str | None = None  # reasoning is sent in full
    generate_summary: str | None = None
    context: str | None = None  # no effect: the conversation has all of it
    mode: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # agentrl adds no padding


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request."""

    NEUTRAL: ClassVar[Table] = OF_RESPONSES

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None  # every call is recorded
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex's
    access_programs: Any = None
