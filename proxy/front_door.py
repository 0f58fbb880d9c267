"""The way that every model call takes: straight to its handler, past the layers that serve everything else.

POST /v1/…, /sessions/ID/v1/… ─► handler
all else ─────────────────────► FastAPI, which knows the same routes for OpenAPI and for its 404 and 405
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Any]]
OF_SESSION = "/sessions/"


class KnownHeaders(Headers):
    """Headers that are looked up; Starlette's are searched, each time anew."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._known = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}

    def __getitem__(self, key: str) -> str:
        return self._known[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._known

    def get(self, key: str, default: Any = None) -> Any:
        """The first header of this name."""
        return self._known.get(key.lower(), default)


class FrontDoor:
    """The proxy as an ASGI application. `handlers` are those of POST requests, by path without the session's prefix."""

    def __init__(self, app: FastAPI, handlers: Mapping[str, Handler]) -> None:
        self.app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection or one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            params = {}
            if path.startswith(OF_SESSION):
                session_id, slash, rest = path[len(OF_SESSION) :].partition("/")
                path, params = slash + rest, {"session_id": session_id}
            handler = self._handlers.get(path)
            if handler is not None and params.get("session_id") != "":
                scope["app"], scope["path_params"] = self.app, params
                request = Request(scope, receive, send)
                request._headers = KnownHeaders(scope["headers"])
                return await self._answer(handler, request)
        await self.app(scope, receive, send)

    async def _answer(self, handler: Handler, request: Request) -> None:
        try:
            response = await handler(request)
            await response(request.scope, request.receive, request._send)
        except Exception as error:
            known: Mapping[Any, Any] = self.app.exception_handlers
            told = next((known[kind] for kind in type(error).__mro__ if kind in known), None)
            if told is None:
                raise
            refusal: Any = await told(request, error)
            await refusal(request.scope, request.receive, request._send)
