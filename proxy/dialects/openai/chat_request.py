"""The body of a Chat Completions request, and functions for values that several of its fields determine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from agentrl.domain.schemas import Json
from agentrl.errors import bad_parameter
from agentrl.proxy.dialects.neutral_fields import OF_CHAT, Neutral, Table
from agentrl.proxy.dialects.parameter_errors import check_neutral
from agentrl.proxy.dialects.sampling_fields import SamplingBody, Seed, Stop, TopLogprobs
from agentrl.proxy.dialects.tool_results import Results

EXCLUDED = Neutral((False,), "reasoning is always delivered")


CONTINUOUS = Neutral((False,), "usage is sent once, at the end")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # agentrl adds no padding
    continuous_usage_stats: bool | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to reason. The policy itself decides how much."""

    effort: str | None = None
    max_tokens: int | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    include: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of a request."""

    NEUTRAL: ClassVar[Table] = OF_CHAT

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None  # OpenRouter's
    usage: UsageOptions | None = None  # OpenRouter's


def check_stream_options(options: StreamOptions | None) -> None:
    """Raise RequestError 400 for unsupported options."""
    if options is not None:
        check_neutral("stream_options.continuous_usage_stats", options.continuous_usage_stats, CONTINUOUS)


def thinks_at(effort: str | None) -> bool | None:
    """Whether a reasoning effort asks for reasoning; None if it is not given."""
    return None if effort is None else effort != "none"


def thinks_of(data: ChatBody) -> bool | None:
    asked = data.reasoning or Reasoning()
    effort = data.reasoning_effort or asked.effort
    return asked.enabled if effort is None else thinks_at(effort)


def max_tokens_of(data: ChatBody) -> int | None:
    """The token budget, from either of its two parameters. Raises RequestError 400 if they differ."""
    new, old = data.max_completion_tokens, data.max_tokens
    if new is not None and old is not None and new != old:
        raise bad_parameter("max_tokens", "max_tokens and max_completion_tokens are the same: give one of them")
    return new or old


def check_results(messages: Sequence[Json]) -> None:
    """Raise RequestError 400 for a tool result without a call."""
    results = Results()
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            results.call(call["id"])
        if message["role"] == "tool":
            results.result(message["tool_call_id"], f"messages[{i}].tool_call_id")
    results.check()
