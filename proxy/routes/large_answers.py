"""Answers that grow with what was recorded: read and written as JSON in a thread, never on the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy import Connection
from starlette.responses import Response

from agentrl.proxy.state import ProxyState


async def answer(state: ProxyState, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Response:
    """The answer of a route with what `make(conn, …)` returns."""

    def read(conn: Connection) -> bytes:
        return as_json(make(conn, *args, **kwargs))

    return Response(await state.read(read), media_type="application/json")


def as_json(value: Any) -> bytes:
    """JSON; integers beyond 64 bits, which orjson does not write, included."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
