"""Counts model calls, from the request to the last byte of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrl.errors import RequestError, StoreError, ValueRefused
from agentrl.proxy.dialects.dialect import Dialect
from agentrl.proxy.metrics.counters import Metrics
from agentrl.proxy.routes import app_parts


class _Counted:
    """A response that is counted once it has been sent."""

    __slots__ = ("_dialect", "_metrics", "_response", "_since")

    def __init__(self, metrics: Metrics, dialect: Dialect, since: float, response: Response) -> None:
        self._metrics, self._dialect, self._since, self._response = metrics, dialect, since, response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = getattr(self._response, "streamed", isinstance(self._response, StreamingResponse))
        status = self._response.status_code
        if streamed:
            self._metrics.streams.inc()
        try:
            await self._response(scope, receive, send)
        except BaseException as error:
            status = _status_of(self._dialect, error)
            raise
        finally:
            if streamed:
                self._metrics.streams.dec()
            self._metrics.over(self._dialect.name, status, self._since)


def counted(dialect: Dialect, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Any]]:
    """The handler of a model route, with its calls counted."""

    async def handle(request: Request) -> _Counted:
        metrics = app_parts.metrics(request)
        since = metrics.begun()
        try:
            response = await handler(request)
        except BaseException as error:
            metrics.over(dialect.name, _status_of(dialect, error), since)
            raise
        return _Counted(metrics, dialect, since, response)

    return handle


def _status_of(dialect: Dialect, error: BaseException) -> int:
    """The status that the error handlers answer with."""
    match error:
        case RequestError():
            return dialect.status(error)
        case ValueRefused():
            return 400
        case StoreError():
            return 503
        case asyncio.CancelledError():
            return 499
    return 500
