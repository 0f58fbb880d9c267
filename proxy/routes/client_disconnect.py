"""Notices that a client has closed its connection while it waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from agentrl.errors import RequestError

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """The result of `answer`. When the client disconnects first, cancels it and raises RequestError 499."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait([answering, leaving])
    raise RequestError(499, "the client disconnected", code="client_closed_request")
