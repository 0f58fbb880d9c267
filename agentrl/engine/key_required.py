"""ASGI middleware in front of a server's routes: they need the engine's key, and no web page may call them."""

from __future__ import annotations

import hmac
from typing import Any

from agentrl.engine.engine_keys import authorization

OPEN_PATHS = ("/health", "/ready")
"""Health checks, which need no key."""
UNAUTHORIZED = b'{"error": {"message": "this engine requires its key", "code": 401}}'


class KeyRequired:
    """Requires the key for all paths except OPEN_PATHS, and for reads below `with_tokens`, which need a token there."""

    def __init__(self, app: Any, *, key: str, with_tokens: str | None = None) -> None:
        self._app = app
        self._expected = authorization(key)["Authorization"].encode()
        self._with_tokens = with_tokens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check the key, then call the app."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._may(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: Any) -> bool:
        below = self._with_tokens
        if below is not None and scope["method"] in ("GET", "HEAD", "DELETE") and scope["path"].startswith(below):
            return True
        if scope["method"] == "GET" and scope["path"] in OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def without_cors(app: Any) -> list[Any]:
    """The middleware of a Starlette app that has not started, without that which lets web pages call it."""
    from starlette.middleware.cors import CORSMiddleware

    return [middleware for middleware in app.user_middleware if middleware.cls is not CORSMiddleware]
