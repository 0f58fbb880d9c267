"""Routes that read nothing of a stranger's body, and of anybody's no more than they may send."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from agentrl.proxy.access import authentication, limits
from agentrl.proxy.state import ProxyState

OPEN_ROUTES = ("/health", "/metrics")
"""They decide for themselves who may look."""
BODY_BYTES = 4 * 1024 * 1024
"""The largest body of a route that is no model call: it is decoded on the event loop."""


class GuardedRoute(APIRoute):
    """`APIRouter(route_class=GuardedRoute)`: the key is checked first, then the body is read within its limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler behind the guard."""
        handle = super().get_route_handler()
        if self.path in OPEN_ROUTES:
            return handle

        async def guarded(request: Request) -> Response:
            state: ProxyState = request.app.state.proxy
            await authentication.authenticate(request, state)
            body = await limits.read_body(request, state, most=BODY_BYTES)
            return await handle(Request(request.scope, _again(body, request)))

        return guarded


def _again(body: bytes, request: Request) -> Callable[[], Coroutine[Any, Any, Message]]:
    """The body once more, then what comes after it."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await request.receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
