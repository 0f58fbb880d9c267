"""Reads the answers of upstreams: server-sent events, and JSON for the store."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

END_OF_EVENT = re.compile(rb"\r?\n\r?\n")


async def split_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The events of a stream, byte for byte, however it is cut into chunks; then the rest after the last event."""
    buffer, scanned = b"", 0
    async for chunk in chunks:
        buffer += chunk
        start = 0
        for end in END_OF_EVENT.finditer(buffer, scanned):
            yield buffer[start : end.end()]
            start = end.end()
        buffer = buffer[start:]
        scanned = max(0, len(buffer) - 3)  # the end of an event may straddle two chunks
    if buffer:
        yield buffer


def data_of(event: bytes) -> Any:
    """The payload of an event: a JSON value, or else text; None if the event has no `data` line."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    data = b"\n".join(lines)
    try:
        return storable_json(data)
    except ValueError:
        return data.decode(errors="replace")


def storable_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, and for nesting too deep to be written again."""
    value = orjson.loads(text)
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise ValueError("it is nested too deeply") from error
    return value
