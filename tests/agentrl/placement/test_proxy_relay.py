"""The relay sends each connection to a live proxy, skips dead ones, and waits while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl.engine.server_process import free_port
from agentrl.placement.proxy_relay import ProxyRelay


class Echo:
    """Answers each connection with its name and what was sent, once the client has ended its half."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    async def start(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        return str(host), int(port)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.name + await reader.read())
        writer.close()


@pytest.fixture
async def relay() -> AsyncIterator[ProxyRelay]:
    relay = ProxyRelay()
    await relay.start()
    yield relay
    await relay.close()


async def asked(relay: ProxyRelay, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(relay.url.rpartition(":")[2]))
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_connections_reach_live_proxies_only(relay):
    first, second = Echo(b"1"), Echo(b"2")
    relay.targets = [await first.start(), ("127.0.0.1", free_port()), await second.start()]
    answers = {await asked(relay, b"x" * 200_000) for _ in range(20)}
    assert answers == {b"1" + b"x" * 200_000, b"2" + b"x" * 200_000}


async def test_a_connection_waits_for_the_first_proxy(relay):
    waiting = asyncio.create_task(asked(relay, b"hello"))
    await asyncio.sleep(0)
    relay.targets = [await Echo(b"late ").start()]
    assert await waiting == b"late hello"


async def test_a_connection_is_closed_when_no_proxy_comes(relay, monkeypatch):
    monkeypatch.setattr("agentrl.placement.proxy_relay.WAIT_S", 0.0)
    assert await asked(relay, b"") == b""
