"""An engine joins a run's fleet when it serves, survives a proxy that is away, and leaves at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.domain.schemas import Json
from agentrl.engine import membership
from agentrl.engine.engine_client import Health
from agentrl.engine.engine_keys import derived_key, key_digest
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.membership import LEASE_S, Membership, Place, member
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import UserError
from agentrl.testing import FakeEngine


class Proxy:
    """Records the requests about engines, with their keys; answers with the statuses in `answers`, then with 200."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Json]] = []
        self.answers: list[int] = []
        self.keys: set[str] = set()
        self.told = asyncio.Condition()
        app = web.Application()
        app.router.add_post("/api/engines/{what}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"])
        async with self.told:
            self.requests.append((request.match_info["what"], await request.json()))
            self.told.notify_all()
        return web.Response(status=self.answers.pop(0) if self.answers else 200, text="why")

    async def asked(self, times: int) -> None:
        """Wait until so many requests have come."""
        async with self.told:
            await self.told.wait_for(lambda: len(self.requests) >= times)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/"))


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """A proxy for engines that do not pause between their requests."""
    for name in ("RETRY_S", "RENEW_EVERY_S", "LEFT_S"):
        monkeypatch.setattr(membership, name, 0.0)
    made = Proxy()
    await made.server.start_server()
    yield made
    await made.server.close()


def spec(engine: FakeEngine, tmp_path: Path) -> EngineSpec:
    return EngineSpec(model=tmp_path, port=engine.port, log_file=tmp_path / "log")


async def test_an_engine_is_a_member_while_the_block_runs(
    proxy: Proxy, fake_engine: FakeEngine, tmp_path: Path
) -> None:
    async with member(spec(fake_engine, tmp_path), Place(proxy.url, "admin", "http://host:1")):
        await proxy.asked(2)
    join = {"url": "http://host:1", "lease_s": LEASE_S, "key_digest": None, "backend": "sglang"}
    assert proxy.requests[:2] == [("join", join)] * 2
    assert proxy.requests.count(("leave", {"url": "http://host:1"})) == 1
    assert proxy.keys == {"Bearer admin"}


async def test_without_a_place_an_engine_joins_nothing(proxy: Proxy, fake_engine: FakeEngine, tmp_path: Path) -> None:
    async with member(spec(fake_engine, tmp_path), None):
        pass
    assert proxy.requests == []


async def test_an_engine_that_never_served_neither_joins_nor_leaves(
    proxy: Proxy, fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    async def dead(client: SGLangClient, timeout_s: float = 10.0) -> Health:
        looked.set()
        return Health.DEAD

    monkeypatch.setattr(SGLangClient, "health", dead)
    async with member(spec(fake_engine, tmp_path), Place(proxy.url, "admin", "http://host:1")):
        await looked.wait()
    assert proxy.requests == []


async def test_a_refused_engine_ends_the_block(proxy: Proxy, fake_engine: FakeEngine, tmp_path: Path) -> None:
    proxy.answers = [403]
    with pytest.raises(ExceptionGroup) as refused:
        async with member(spec(fake_engine, tmp_path), Place(proxy.url, "admin", "http://host:1")):
            await asyncio.Event().wait()
    (error,) = refused.value.exceptions
    assert isinstance(error, UserError)
    assert str(error) == f"{proxy.url.rstrip('/')} refused http://host:1: why"


@pytest.fixture
async def joining(proxy: Proxy, fake_engine: FakeEngine) -> AsyncIterator[Membership]:
    """An engine with a key of its own, and its place at the proxy."""
    async with aiohttp.ClientSession() as http:
        yield Membership(
            SGLangClient(fake_engine.url, http), http, Place(proxy.url, "admin", "http://host:1", has_own_key=True)
        )


async def kept(joining: Membership, proxy: Proxy, requests: int) -> None:
    """Keep the membership until the proxy has had so many requests."""
    keeping = asyncio.create_task(joining.keep())
    await proxy.asked(requests)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_the_proxy_learns_the_digest_of_an_engines_own_key(joining: Membership, proxy: Proxy) -> None:
    await kept(joining, proxy, 1)
    assert proxy.requests[0][1]["key_digest"] == key_digest(derived_key("admin", "http://host:1"))


async def test_an_engine_waits_for_a_proxy_that_is_not_ready(
    joining: Membership, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.answers = [503, 500]
    with caplog.at_level(logging.WARNING):
        await kept(joining, proxy, 4)
    assert joining.joined
    assert [what for what, _ in proxy.requests] == ["join"] * len(proxy.requests)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("does not answer: " in one and one.endswith("; trying again") for one in said)


async def test_an_engine_that_leaves_a_proxy_that_is_away_leaves_it_the_lease(
    joining: Membership, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    await kept(joining, proxy, 2)
    proxy.answers = [503]
    with caplog.at_level(logging.WARNING):
        await joining.leave()
    assert joining.joined
    assert proxy.requests[-1][0] == "leave"
    assert f"the lease ends in {LEASE_S:g} s" in caplog.text


async def test_a_paused_engine_joins_when_it_serves_again(
    joining: Membership, proxy: Proxy, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Health] = []
    health = SGLangClient.health

    async def looked(client: SGLangClient, timeout_s: float = 10.0) -> Health:
        looks.append(await health(client, timeout_s))
        if len(looks) == 2:
            assert proxy.requests == []
            await client.continue_generation()
        return looks[-1]

    monkeypatch.setattr(SGLangClient, "health", looked)
    async with aiohttp.ClientSession() as http:
        await SGLangClient(fake_engine.url, http).pause()
    await kept(joining, proxy, 1)
    assert looks[:3] == [Health.PAUSED, Health.PAUSED, Health.SERVING]
