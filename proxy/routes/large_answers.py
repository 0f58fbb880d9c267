"""Answers whose size grows with the run: read from the store and encoded as JSON in a thread, off the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from agentrl.proxy.run_store import RunStore


async def answer(store: RunStore, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Response:
    """The result of `make(conn, …)`, as the JSON response of a route."""
    return Response(await store.read_then(as_json, make, *args, **kwargs), media_type="application/json")


def as_json(value: Any) -> bytes:
    """JSON, including integers beyond 64 bits, which orjson refuses."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
