"""Encodes server-sent events."""

from __future__ import annotations

from typing import Any

import orjson


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with a JSON payload."""
    line = b"data: " + orjson.dumps(data) + b"\n\n"
    return line if event is None else b"event: " + event.encode() + b"\n" + line
