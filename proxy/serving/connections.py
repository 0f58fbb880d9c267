"""Uvicorn with time and size limits on idle connections.

Uvicorn waits forever for the headers of a request, of any size, and for a client that does not read its answer. Here
each connection has one timer, which checks both every CHECK_EVERY_S. This adds no work to a call.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.proxy.serving.prefork import GRACEFUL_S

CHECK_EVERY_S = 5.0
HEADERS_S = 20.0
"""Limit for the headers of a request to arrive."""
STALLED_S = 120.0
"""Limit for a client that does not read its answer."""
MAX_HEADER_BYTES = 65_536
KEEP_ALIVE_S = 30
"""How long an idle connection stays open: longer than the 5 s of SDKs' pools."""


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which closes connections that are too slow or send too large headers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heading_since: float | None = self.loop.time()  # when it began to wait for a request's headers
        self._header_bytes = 0
        self._stalled_since: float | None = None  # when the client stopped reading
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its headers are due."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(CHECK_EVERY_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse headers that are too large; otherwise pass the data on."""
        if self._heading_since is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not _ends_headers(data):
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request has begun: its headers are due."""
        if self._heading_since is None:
            self._heading_since, self._header_bytes = self.loop.time(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are complete: the application has its own limits."""
        self._heading_since = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than the proxy writes."""
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled_since = None
        super().resume_writing()

    def shutdown(self) -> None:
        """The server stops: answers are finished, streams without an end (`endless` in their scope) are cut."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.scope.get("endless"):
            self.transport.close()
        super().shutdown()

    def _check(self) -> None:
        now = self.loop.time()
        if self._heading_since is not None and now - self._heading_since > HEADERS_S:
            self._refuse(b"408 Request Timeout")
        elif self._stalled_since is not None and now - self._stalled_since > STALLED_S:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(CHECK_EVERY_S, self._check)

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()


def _ends_headers(data: bytes) -> bool:
    """Whether the headers end in these bytes: what follows may be a body of any size."""
    return b"\r\n\r\n" in data


def server_config(app: ASGIApp, log_level: str) -> uvicorn.Config:
    """The configuration of uvicorn in every process that serves the proxy."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        log_config=None,
        log_level=log_level,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_S,
    )


def keep_what_is_loaded() -> None:
    """Exempt loaded modules from garbage collection, which costs a tenth of a call's CPU otherwise, and enable it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
