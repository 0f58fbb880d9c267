"""Reads upstream answers in OpenAI Chat Completions and Completions."""

from __future__ import annotations

from typing import Any

from agentrl.proxy.dialects.upstream_event import UpstreamEvent, reported_error, reported_tokens

DONE = "[DONE]"
"""The payload of a stream's last event."""


def read_chunk(data: Any) -> UpstreamEvent:
    """A chunk of a stream, or a whole completion. `[DONE]` counts as a finish reason."""
    if data == DONE:
        return UpstreamEvent(finish_reason="stop", is_last=True)
    if not isinstance(data, dict):
        return UpstreamEvent()
    listed = data.get("choices")
    choices = [choice for choice in listed if isinstance(choice, dict)] if isinstance(listed, list) else []
    reasons = (choice.get("finish_reason") for choice in choices)
    deltas = (choice.get("delta") for choice in choices)
    return UpstreamEvent(
        finish_reason=next((reason for reason in reasons if isinstance(reason, str)), None),
        error=reported_error(data),
        begins_tool_call=any(isinstance(delta, dict) and bool(delta.get("tool_calls")) for delta in deltas),
        output_tokens=reported_tokens(data.get("usage"), "completion_tokens"),
    )
