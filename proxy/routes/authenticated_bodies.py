"""Routes that authenticate before they read the body, and cap its size."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from agentrl.proxy.routes import app_parts

OPEN_ROUTES = ("/health", "/metrics")
"""Routes that check the key themselves, or need none."""
BODY_BYTES = 4 * 1024 * 1024
"""The largest body of a route other than a model call: it is decoded on the event loop."""


class GuardedRoute(APIRoute):
    """`APIRouter(route_class=GuardedRoute)`: checks the key first, then reads the body within its limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, after authentication and the read of the body."""
        handle = super().get_route_handler()
        if self.path in OPEN_ROUTES:
            return handle

        async def guarded(request: Request) -> Response:
            await app_parts.access(request).authenticate(request)
            body = await app_parts.body_limits(request).read(request, most=BODY_BYTES)
            return await handle(Request(request.scope, _replayed(body, request)))

        return guarded


def _replayed(body: bytes, request: Request) -> Callable[[], Coroutine[Any, Any, Message]]:
    """A `receive` that gives the body that was read, then the messages after it."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await request.receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
