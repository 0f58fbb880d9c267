"""How the proxy is served: uvicorn, whose connections nobody can hold for nothing.

Uvicorn waits for ever for the headers of a request, of any size, and for a client that does not read its answer. Each
connection has one timer here, which looks every LOOK_EVERY_S; nothing is added to the path of a call.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.proxy.serving.prefork import GRACEFUL_S

LOOK_EVERY_S = 5.0
HEADERS_S = 20.0
"""For the headers of a request to arrive."""
STALLED_S = 120.0
"""For a client to read something of an answer that waits for it."""
MAX_HEADER_BYTES = 65_536
KEEP_ALIVE_S = 30
"""Seconds that a connection without a request stays open: more than the 5 of SDKs' pools."""


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which also ends connections that are too slow or send too much before a request begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heading_since: float | None = self.loop.time()  # the headers of a request are awaited
        self._header_bytes = 0
        self._stalled_since: float | None = None  # the client reads nothing
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here: its headers are due."""
        super().connection_made(transport)
        self._look = self.loop.call_later(LOOK_EVERY_S, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse headers without end; else as ever."""
        if self._heading_since is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not _ends_headers(data):
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The first bytes of a request: its headers are due."""
        if self._heading_since is None:
            self._heading_since, self._header_bytes = self.loop.time(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The application takes it from here."""
        self._heading_since = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stalled_since = None
        super().resume_writing()

    def _look_again(self) -> None:
        now = self.loop.time()
        if self._heading_since is not None and now - self._heading_since > HEADERS_S:
            self._refuse(b"408 Request Timeout")
        elif self._stalled_since is not None and now - self._stalled_since > STALLED_S:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK_EVERY_S, self._look_again)

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()


def _ends_headers(data: bytes) -> bool:
    """Whether the headers end in these bytes: what follows may be a body of any size."""
    return b"\r\n\r\n" in data


def server_config(app: ASGIApp, log_level: str) -> uvicorn.Config:
    """What a process that serves the proxy hands to uvicorn."""
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
    """Modules stay for ever, so the garbage collector need not look at them: a tenth of a call's CPU."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
