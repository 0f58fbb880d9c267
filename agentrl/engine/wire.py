"""HTTP/1.1 for the one request that every call makes: a POST whose answer is streamed.

aiohttp serves everything else. For this request it uses 2.5 times the CPU (1.6 times where each token is an event), and
httpcore 75 times (6 times): `benchmarks/wire.py`. A connection is kept for the next call, but not so long that the
server may be closing it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

CONNECT_S = 10.0
IDLE_S = 3.0
"""Seconds after which a kept connection is not used again: servers close theirs after 5."""
END_S = 1.0
"""For the end of a response to arrive once all that matters of it is here."""


class NotConnected(ConnectionError):
    """No connection could be made: the server knows nothing of the request."""


class Wire:
    """The connections to one server. Its `url` may have a path before all others; `headers` go with each request."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        always = {"Host": parts.netloc, **(headers or {})}
        self._head = "".join([f"{name}: {value}\r\n" for name, value in always.items()])
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Connection:
        """Send JSON; returns the connection once the head of the response is here. `release` it in any case.

        The values of `headers` are printable; `timeout_s` bounds the whole response. Raises NotConnected, or another
        OSError (a TimeoutError is one) once the server may have the request.
        """
        assert all(map(str.isprintable, headers.values()))
        connection = self._kept() or await self._connect()
        self._open.add(connection)
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n{more}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.send(head.encode() + body, timeout_s)
        try:
            await connection.begun()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: Connection, *, ending: bool = False) -> None:
        """The caller wants no more of the response, which is `ending` by itself; else the server is hung up on."""
        self._open.discard(connection)
        connection.let_go(wait_s=END_S if ending else 0.0)

    def hang_up(self) -> None:
        """Break off every response: who waits for it gets a ConnectionError."""
        for connection in list(self._open):
            connection.fail(ConnectionAbortedError("it was hung up on"))

    def close(self) -> None:
        """End all connections."""
        self.hang_up()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        since = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > since and not connection.lost:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._idle), self._host, self._port, ssl=self._tls
                )
        except OSError as error:
            raise NotConnected(str(error) or f"no connection within {CONNECT_S:g} s") from error
        return connection


class Connection(asyncio.Protocol):
    """One connection, with one response at a time. `idle` is where it waits for its next request."""

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._parts: list[bytes] = []
        self._wanted = False
        self._complete = True
        self._stays = False  # the server keeps the connection
        self.status = 0
        self.lost = False
        self.idle_since = 0.0

    # -- one response ----------------------------------------------------------------------------------------------

    def send(self, request: bytes, timeout_s: float) -> None:
        """Begin; what follows raises TimeoutError once `timeout_s` are over."""
        assert self._transport is not None
        assert self._complete
        self.status, self._complete, self._error, self._wanted = 0, False, None, True
        self._timer = self._loop.call_later(timeout_s, self.fail, TimeoutError())
        self._transport.write(request)

    async def begun(self) -> None:
        """Wait for the head of the response: `status`. Raises OSError."""
        while not self.status:
            await self._news()

    async def more(self) -> bytes:
        """What has come of the body since; empty at its end. Raises OSError."""
        while not self._parts:
            if self._complete:
                return b""
            await self._news()
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def rest(self) -> bytes:
        """All that is left of the body. Raises OSError."""
        parts = []
        while part := await self.more():
            parts.append(part)
        return b"".join(parts)

    def let_go(self, wait_s: float) -> None:
        """Nobody wants more of the response; it may end by itself in so many seconds."""
        self._wanted = False
        self._parts = []
        self._stop_timer()
        if self._complete and not self.lost:
            self._rest()
        elif wait_s and not self.lost:
            self._timer = self._loop.call_later(wait_s, self.close)
        else:
            self.close()

    def fail(self, error: OSError) -> None:
        """Break off: who waits gets the error."""
        self._error = self._error or error
        self._wake()
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.lost = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _rest(self) -> None:
        if self._stays:
            self.idle_since = self._loop.time()
            self._idle.append(self)
        else:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        """The server is there."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes of a response."""
        if self._complete:  # it answers nothing
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionAbortedError(f"it speaks no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server hung up, or we did."""
        self.lost = True
        if self in self._idle:
            self._idle.remove(self)
        if not self._complete:
            self.fail(exc if isinstance(exc, OSError) else ConnectionResetError("it hung up"))

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """The head is here."""
        self.status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._wanted:
            self._parts.append(body)
            self._wake()

    def on_message_complete(self) -> None:
        """The response is whole."""
        self._complete = True
        self._stays = self._parser.should_keep_alive()
        if self._wanted:
            self._wake()
        else:
            self._stop_timer()
            self._rest()
