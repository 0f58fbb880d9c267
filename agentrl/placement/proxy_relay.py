"""Relays connections of one host to the run's proxies, wherever they are: `http://127.0.0.1:PORT` for every command.

Each new connection goes to one of the proxies that are alive, at random; if it does not accept, to another. A
connection that breaks is the client's to repeat, as with any proxy that dies: sessions need no fixed proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

CHUNK = 65536
CONNECT_S = 2.0
WAIT_S = 30.0
"""How long a new connection waits while no proxy is alive."""
POLL_S = 0.2

Address = tuple[str, int]


class ProxyRelay:
    """A TCP server on `host`. Its owner keeps `targets` current: the addresses of the proxies that are alive."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.targets: Sequence[Address] = ()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The URL that commands use."""
        assert self._server is not None
        return f"http://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._relay, self._host, 0)

    async def close(self) -> None:
        """Stop listening; connections end with the process."""
        if self._server is not None:
            self._server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = await self._connect()
        if connected is None:
            writer.close()
            return
        back, forth = connected
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, forth))
            group.create_task(_copy(back, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to a live proxy; None when none accepts within WAIT_S."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            for host, port in random.sample(self.targets, len(self.targets)):
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
