"""The relay sends each connection to a live proxy, and reads which are alive only when a connection needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.engine.server_process import free_port
from agentrl.errors import StoreError, StoreUnavailable
from agentrl.placement import proxy_relay
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


class Greeting(Echo):
    """Says hello, and keeps the connection."""

    def __init__(self) -> None:
        super().__init__(b"hello")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.name)


class Registry:
    """The database's list of live proxies, and how often it was read. It answers while `answers` is set."""

    def __init__(self) -> None:
        self.proxies: list[tuple[str, int]] = []
        self.reads = 0
        self.was_read = asyncio.Event()
        self.error: StoreError | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self) -> list[tuple[str, int]]:
        self.reads += 1
        await self.answers.wait()
        self.was_read.set()
        if self.error is not None:
            raise self.error
        return list(self.proxies)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def relay(registry: Registry) -> AsyncIterator[ProxyRelay]:
    relay = ProxyRelay(registry.read)
    await relay.start()
    yield relay
    await relay.close()


@pytest.fixture
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection reads the live proxies."""
    monkeypatch.setattr(proxy_relay, "FRESH_S", 0.0)
    monkeypatch.setattr(proxy_relay, "POLL_S", 0.0)


async def asked(relay: ProxyRelay, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(relay.url.rpartition(":")[2]))
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_connections_reach_live_proxies_only(relay, registry):
    registry.proxies = [await Echo(b"1").start(), ("127.0.0.1", free_port()), await Echo(b"2").start()]
    answers = {await asked(relay, b"x" * 200_000) for _ in range(20)}
    assert answers == {b"1" + b"x" * 200_000, b"2" + b"x" * 200_000}


async def test_many_connections_share_a_read_and_none_reads_without_one(relay, registry, monkeypatch):
    monkeypatch.setattr(proxy_relay, "FRESH_S", 3600.0)
    registry.proxies = [await Echo(b"1").start()]
    assert registry.reads == 0
    await asyncio.gather(*(asked(relay, b"") for _ in range(20)))
    assert await asked(relay, b"later") == b"1later"
    assert registry.reads == 1


async def test_a_dead_proxy_is_skipped_and_a_new_one_is_used(relay, registry, always_read):
    first = Echo(b"1")
    registry.proxies = [await first.start()]
    assert await asked(relay, b"") == b"1"
    first.server.close()
    registry.was_read.clear()
    waiting = asyncio.create_task(asked(relay, b""))
    await registry.was_read.wait()  # no proxy of this read accepts
    registry.proxies.append(await Echo(b"2").start())
    assert await waiting == b"2"


@pytest.mark.parametrize("outage", ["fails", "hangs"])
async def test_the_last_known_proxies_are_used_while_the_database_is_away(
    relay, registry, always_read, monkeypatch, outage
):
    monkeypatch.setattr(proxy_relay, "READ_S", 3600.0)
    registry.proxies = [await Echo(b"1").start()]
    assert await asked(relay, b"") == b"1"
    if outage == "fails":
        registry.error = StoreUnavailable("away")
    else:
        registry.answers.clear()
        monkeypatch.setattr(proxy_relay, "READ_S", 0.0)
    assert await asked(relay, b"") == b"1"
    assert await asked(relay, b"") == b"1"
    if outage == "hangs":
        assert registry.reads == 2  # nobody asks again while a read is under way
    registry.error, registry.proxies = None, [await Echo(b"2").start()]
    registry.answers.set()
    monkeypatch.setattr(proxy_relay, "READ_S", 3600.0)
    assert await asked(relay, b"") == b"2"


async def test_a_connection_waits_for_the_first_proxy(relay, registry, always_read):
    waiting = asyncio.create_task(asked(relay, b"hello"))
    await registry.was_read.wait()
    registry.proxies = [await Echo(b"late ").start()]
    assert await waiting == b"late hello"


async def test_a_connection_is_closed_when_no_proxy_comes(relay, monkeypatch):
    monkeypatch.setattr(proxy_relay, "WAIT_S", 0.0)
    assert await asked(relay, b"") == b""


@pytest.mark.parametrize("stage", ["waits for a proxy", "is relayed"])
def test_a_program_that_ends_with_open_connections_reports_no_fault(stage):
    faults: list[Any] = []

    async def program() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda loop, fault: faults.append(fault))
        registry = Registry()
        relay = ProxyRelay(registry.read)
        if stage == "is relayed":
            registry.proxies = [await Greeting().start()]
        await relay.start()
        reader, _ = await asyncio.open_connection("127.0.0.1", int(relay.url.rpartition(":")[2]))
        await registry.was_read.wait()
        if stage == "is relayed":
            assert await reader.readexactly(5) == b"hello"
        await relay.close()
        return await reader.read()

    assert asyncio.run(program()) == b""
    assert faults == []


async def test_a_fault_of_the_database_ends_the_connection_and_is_logged(relay, registry, caplog):
    registry.error = StoreError("no such table: part_ranks")
    assert await asked(relay, b"") == b""
    assert "no such table: part_ranks" in caplog.text
