"""Reads upstream answers in Anthropic Messages."""

from __future__ import annotations

from typing import Any

from agentrl.proxy.dialects.upstream_event import UpstreamEvent, reported_error, reported_tokens


def read_message_event(data: Any) -> UpstreamEvent:
    """An event of a stream, or a whole message. `message_delta` has the stop reason, `message_stop` ends the stream."""
    if not isinstance(data, dict):
        return UpstreamEvent()
    is_last = data.get("type") == "message_stop"
    reason, usage = None, None
    match data:
        case {"stop_reason": str(given)} | {"delta": {"stop_reason": str(given)}}:
            reason = given
    match data:
        case {"usage": counts} | {"message": {"usage": counts}}:
            usage = counts
    match data:
        case {"type": "content_block_start", "content_block": {"type": "tool_use"}}:
            begins_tool_call = True
        case _:
            begins_tool_call = False
    return UpstreamEvent(
        finish_reason=reason or ("stop" if is_last else None),
        error=reported_error(data),
        begins_tool_call=begins_tool_call,
        is_last=is_last,
        output_tokens=reported_tokens(usage, "output_tokens"),
    )
