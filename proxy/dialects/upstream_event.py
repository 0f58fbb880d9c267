"""The parts of an upstream's answer that the proxy acts on, in a form that all dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamEvent:
    """One event of a streamed answer, or a whole answer."""

    finish_reason: str | None = None  # the answer ends with this event
    error: str | None = None  # the event as JSON text, if it reports an error
    begins_tool_call: bool = False  # also true for each later part of a tool call in Chat Completions
    is_last: bool = False  # nothing follows in the stream
    output_tokens: int | None = None  # of the answer so far, as the upstream reports it; unchecked


def reported_error(data: Mapping[str, Any]) -> str | None:
    """An event that reports an error, as JSON text; None for other events."""
    is_error = data.get("type") == "error" or isinstance(data.get("error"), dict)
    return orjson.dumps(data).decode() if is_error else None


def reported_tokens(usage: Any, name: str) -> int | None:
    """The count `name` of a `usage` object; None if it is absent or not an integer."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None
