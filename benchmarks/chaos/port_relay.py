"""Passes TCP connections from one address of this machine on to a server at another, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from sqlalchemy import make_url

from chaos.network_hosts import HERE

CHUNK_BYTES = 2**18


def bridged(database_url: str) -> str:
    """The URL of a database on this machine as simulated hosts reach it: through a relay on the bridge."""
    url = make_url(database_url)
    relay = PortRelay(HERE, url.host or "127.0.0.1", url.port or 5432)
    return url.set(host=HERE, port=relay.port).render_as_string(hide_password=False)


class PortRelay:
    """Listens on a free port of `host` while the program runs."""

    def __init__(self, host: str, to_host: str, to_port: int) -> None:
        self._host, self._target = host, (to_host, to_port)
        self._listening = threading.Event()
        self.port = 0
        threading.Thread(target=asyncio.run, args=[self._serve()], daemon=True).start()
        self._listening.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, self._host, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(*self._target)
        await asyncio.gather(_pass_on(reader, requests), _pass_on(answers, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # either side may be killed
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
