"""The ASGI application: model calls go straight to their handler, past the layers of FastAPI.

POST /v1/…, /sessions/ID/v1/… ─► handler
all other requests ────────────► FastAPI, which also has these routes, for OpenAPI and for its 404 and 405
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


class IndexedHeaders(Headers):
    """Headers with an index by name. Starlette searches its headers from the start at every look-up."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}

    def __getitem__(self, key: str) -> str:
        return self._by_name[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._by_name

    def get(self, key: str, default: Any = None) -> Any:
        """The first header of this name."""
        return self._by_name.get(key.lower(), default)


class IndexedRequest(Request):
    """A request whose headers are indexed."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._indexed = IndexedHeaders(scope["headers"])

    @property
    def headers(self) -> Headers:
        """The request's headers."""
        return self._indexed


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
                return await self._answer(handler, scope, receive, send)
        await self.app(scope, receive, send)

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        request = IndexedRequest(scope, receive, send)
        try:
            response = await handler(request)
            await response(scope, receive, send)
        except Exception as error:
            known: Mapping[Any, Any] = self.app.exception_handlers
            handle = next((known[kind] for kind in type(error).__mro__ if kind in known), None)
            if handle is None:
                raise
            refusal: Any = await handle(request, error)
            await refusal(scope, receive, send)
