"""Bounded bodies and JSON answers of ASGI middleware."""

from __future__ import annotations

import json
from typing import Any

MOST_BYTES = 1 << 20
"""Size of the largest body that is read."""


async def read_body(receive: Any, most_bytes: int = MOST_BYTES) -> bytes | None:
    """The body of a request; None when it is larger than `most_bytes`."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most_bytes:
            return None
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


def replay(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body, and then what comes from the connection."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def sized(scope: Any, body: bytes) -> Any:
    """The scope with the length of a body."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return scope | {"headers": [*others, (b"content-length", str(len(body)).encode())]}


async def answer_json(send: Any, status: int, value: Any) -> None:
    """Send a JSON response."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
