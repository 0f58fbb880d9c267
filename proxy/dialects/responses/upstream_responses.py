"""Reads upstream answers in the format of OpenAI Responses."""

from __future__ import annotations

from typing import Any

import orjson

from agentrl.proxy.dialects.upstream_event import UpstreamEvent, reported_error, reported_tokens

LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
FINAL_STATUSES = ("completed", "incomplete", "cancelled")
TOOL_CALLS = ("function_call", "custom_tool_call")


def read_response_event(data: Any) -> UpstreamEvent:
    """Read an event of a stream, or a whole response. The finish reason is the response's final status."""
    if not isinstance(data, dict):
        return UpstreamEvent()
    kind = data.get("type")
    failed = kind == "response.failed"
    response = data if data.get("object") == "response" else data.get("response")
    item = data.get("item") if kind == "response.output_item.added" else None
    return UpstreamEvent(
        finish_reason=_finish_reason(kind, response),
        error=orjson.dumps(data).decode() if failed else reported_error(data),
        begins_tool_call=isinstance(item, dict) and item.get("type") in TOOL_CALLS,
        is_last=kind in LAST_EVENTS,
        output_tokens=reported_tokens(response.get("usage"), "output_tokens") if isinstance(response, dict) else None,
    )


def _finish_reason(kind: Any, response: Any) -> str | None:
    if isinstance(response, dict) and "status" in response:
        status = response["status"]
        return status if status in FINAL_STATUSES else None
    return "stop" if kind in LAST_EVENTS else None
