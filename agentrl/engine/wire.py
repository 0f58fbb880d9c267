"""A minimal HTTP/1.1 client for the generate request: a POST with a streamed response.

Other requests use aiohttp, which takes 2.5 times the CPU for this one (1.6 times with one event per token); httpcore
takes 75 times (6 times), see `benchmarks/wire.py`. Idle connections are reused only for IDLE_S, in which no server
closes them, and are then closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import httptools

CONNECT_S = 10.0
IDLE_S = 3.0
"""Maximum idle seconds of a reused connection; servers close theirs after 5."""
END_S = 1.0
"""How long to wait for the end of a response whose content is complete."""


class NotConnected(ConnectionError):
    """No connection was made, so the server has not seen the request."""


class Wire:
    """The connections to one server. `url` may have a base path; `headers` are sent with each request."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        always = {"Host": parts.netloc, **(headers or {})}
        self._head = "".join([f"{name}: {value}\r\n" for name, value in always.items()])
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()  # those with a response that is read
        self._all: WeakSet[Connection] = WeakSet()

    async def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Connection:
        """Send JSON; returns the connection after the response header. The caller must `release` it.

        The values of `headers` are printable; `timeout_s` limits the whole response. Raises NotConnected, or another
        OSError (such as TimeoutError) once the server may have the request.
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
        """Release a connection. With `ending` the response may finish and the connection be reused; else it
        is closed.
        """
        self._open.discard(connection)
        connection.let_go(wait_s=END_S if ending else 0.0)

    def hang_up(self) -> None:
        """Close all active responses; their readers get a ConnectionError."""
        for connection in list(self._open):
            connection.fail(ConnectionAbortedError("the connection was closed"))

    def close(self) -> None:
        """Close all connections."""
        self.hang_up()
        for connection in list(self._all):
            connection.close()

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
        self._all.add(connection)
        return connection


class Connection(asyncio.Protocol):
    """A connection with one response at a time. `idle` is the pool to which it returns."""

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
        self._keep_alive = False
        self.status = 0
        self.lost = False
        self.idle_since = 0.0

    # -- one response ----------------------------------------------------------------------------------------------

    def send(self, request: bytes, timeout_s: float) -> None:
        """Send a request; later reads raise TimeoutError after `timeout_s`."""
        assert self._transport is not None
        assert self._complete
        self._stop_timer()
        self.status, self._complete, self._error, self._wanted = 0, False, None, True
        self._timer = self._loop.call_later(timeout_s, self.fail, TimeoutError())
        self._transport.write(request)

    async def begun(self) -> None:
        """Wait for the response header, which sets `status`. Raises OSError."""
        while not self.status:
            await self._news()

    async def more(self) -> bytes:
        """Return the body received since the last call; empty at its end. Raises OSError."""
        while not self._parts:
            if self._complete:
                return b""
            await self._news()
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def rest(self) -> bytes:
        """Return the rest of the body. Raises OSError."""
        parts = []
        while part := await self.more():
            parts.append(part)
        return b"".join(parts)

    def let_go(self, wait_s: float) -> None:
        """Discard the response; close the connection unless it ends within `wait_s`."""
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
        """Abort with an error, which readers receive."""
        self._error = self._error or error
        self._wake()
        self.close()

    def close(self) -> None:
        """Close the connection."""
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
        if self._keep_alive:
            self.idle_since = self._loop.time()
            self._idle.append(self)
            self._timer = self._loop.call_later(IDLE_S, self.close)
        else:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are no asyncio.Transport
        """Called when the connection is made."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called with received bytes."""
        if self._complete:  # data without a request
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionAbortedError(f"invalid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed by either side."""
        self.lost = True
        if self in self._idle:
            self._idle.remove(self)
        if not self._complete:
            self.fail(exc if isinstance(exc, OSError) else ConnectionResetError("it hung up"))

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """Called after the response header."""
        self.status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        """Called with a part of the body."""
        if self._wanted:
            self._parts.append(body)
            self._wake()

    def on_message_complete(self) -> None:
        """Called at the end of the response."""
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()
        if self._wanted:
            self._wake()
        else:
            self._stop_timer()
            self._rest()
