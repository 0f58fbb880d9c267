"""Relays connections of one host to the run's proxies, wherever they are: `http://127.0.0.1:PORT` for every command.

Each new connection goes to one of the proxies that are alive, at random; if it does not accept, to another. A
connection that breaks is the client's to repeat, as with any proxy that dies: sessions need no fixed proxy.

A new connection reads which proxies are alive, unless that was read in the last FRESH_S. Without connections nothing is
read. While the database is away, the last known proxies are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from agentrl.errors import StoreUnavailable, root_cause

log = logging.getLogger(__name__)
CHUNK = 65536
CONNECT_S = 2.0
WAIT_S = 30.0
"""How long a new connection waits while no proxy is alive."""
POLL_S = 0.2
FRESH_S = 1.0
"""How long new connections use the proxies that were read, or the last known ones after a read failed."""
READ_S = 1.0
"""How long new connections wait for a read. The database may be away for longer: the last known proxies are used."""

Address = tuple[str, int]


class LiveProxies:
    """The proxies that are alive, as of the last read. `read` may raise StoreUnavailable."""

    def __init__(self, read: Callable[[], Awaitable[Sequence[Address]]]) -> None:
        self._read = read
        self._known: Sequence[Address] = ()
        self._reading: asyncio.Task[None] | None = None
        self._began_at = self._ended_at = 0.0

    async def addresses(self) -> Sequence[Address]:
        """Their addresses. Reads at most once in FRESH_S, for all callers; a read is waited for until READ_S."""
        now = asyncio.get_running_loop().time()
        if self._reading is None or (self._reading.done() and now >= self._ended_at + FRESH_S):
            self._began_at = now
            self._reading = asyncio.create_task(self._renew())
        await asyncio.wait({self._reading}, timeout=max(0.0, self._began_at + READ_S - now))
        if self._reading.done():
            self._reading.result()  # raises what is not an outage
        return self._known

    async def _renew(self) -> None:
        try:
            self._known = await self._read()
        except StoreUnavailable as error:
            log.warning("using the last known proxies: %s", error)
        finally:
            self._ended_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()


class ProxyRelay:
    """A TCP server on `host`. `read` returns the addresses of the proxies that are alive."""

    def __init__(self, read: Callable[[], Awaitable[Sequence[Address]]], host: str = "127.0.0.1") -> None:
        self._host = host
        self._proxies = LiveProxies(read)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL that commands use."""
        assert self._server is not None
        return f"http://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, self._host, 0)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._proxies.close()
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection in a task of our own: asyncio reports a cancelled handler as a fault."""
        connection = asyncio.create_task(self._relay(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(lambda _: writer.close())
        connection.add_done_callback(self._has_ended)

    def _has_ended(self, connection: asyncio.Task[None]) -> None:
        self._connections.discard(connection)
        if not connection.cancelled() and (error := connection.exception()) is not None:
            log.error("a connection could not be relayed: %s", root_cause(error))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (connected := await self._connect()) is None:
            return
        back, forth = connected
        with contextlib.closing(forth):
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, forth))
                group.create_task(_copy(back, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to a live proxy; None when none accepts within WAIT_S."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            targets = await self._proxies.addresses()
            for host, port in random.sample(targets, len(targets)):
                with contextlib.suppress(OSError, TimeoutError):
                    return await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
            if loop.time() > until:
                return None
            await asyncio.sleep(POLL_S)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the source ends, then end the sink's sending half. A broken connection ends the copy."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
            return
    sink.close()
