"""What the client makes of engines that misbehave: every way to fail is one of three errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.server_process import free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable
from agentrl.testing import FakeEngine, Omission, Reply


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def client(http: aiohttp.ClientSession, fake_engine: FakeEngine) -> AsyncIterator[EngineClient]:
    with closing(SGLangClient(fake_engine.url, http)) as client:
        yield client


async def sample(client: EngineClient, **more: str) -> list[Chunk]:
    params = {"max_new_tokens": 8}
    return [chunk async for chunk in client.generate(rid="r" * 32, input_ids=[1, 2], sampling_params=params, **more)]


async def test_an_engine_without_a_connection_is_dead(http: aiohttp.ClientSession) -> None:
    client = SGLangClient(f"http://127.0.0.1:{free_port()}", http)
    assert await client.health() is Health.DEAD
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1") as caught:
        await sample(client)
    assert not isinstance(caught.value, EngineDied)  # it did not get the request


async def test_a_connection_that_breaks_gives_the_tokens_before(client: EngineClient, fake_engine: FakeEngine) -> None:
    fake_engine.enqueue(Reply([5, 6, 7], drop_after=2))
    stream = client.generate(rid="r" * 32, input_ids=[1], sampling_params={})
    assert (await anext(stream)).output_ids == [5]
    assert (await anext(stream)).output_ids == [6]
    with pytest.raises(EngineDied):
        await anext(stream)


@pytest.mark.parametrize("omission", ["output_ids", "output_token_logprobs", "weight_versions", "finish_reason"])
async def test_an_answer_that_lacks_something_fails(
    client: EngineClient, fake_engine: FakeEngine, omission: Omission
) -> None:
    fake_engine.enqueue(Reply([5, 6], omit=frozenset({omission})))
    with pytest.raises(EngineError):
        await sample(client)


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRejected), (500, EngineError), (503, EngineError)])
async def test_statuses_are_told_apart_and_the_message_is_kept(
    client: EngineClient, fake_engine: FakeEngine, status: int, kind: type[EngineError]
) -> None:
    fake_engine.enqueue(Reply(status=status, error="no room"))
    with pytest.raises(kind, match="no room") as caught:
        await sample(client)
    assert type(caught.value) is kind


async def test_a_label_that_is_no_number_fails(client: EngineClient, fake_engine: FakeEngine) -> None:
    fake_engine.version = "default"
    assert (await client.model_info()).version == "default"
    with pytest.raises(EngineUnavailable, match="label it 0"):  # it has restarted: somebody else must do it
        await sample(client)


async def test_a_server_that_cannot_say_whether_it_is_paused_is_too_old(http: aiohttp.ClientSession) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/ready", refuse)
    async with TestServer(app) as server:
        client = SGLangClient(str(server.make_url("")).rstrip("/"), http)
        with pytest.raises(EngineRejected, match="/ready"):
            await client.paused()


async def test_hanging_up_ends_the_wait_for_a_response_that_never_begins(http: aiohttp.ClientSession) -> None:
    connected = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    client = SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", http)
    waiting = asyncio.create_task(sample(client))
    await connected.wait()
    client.hang_up()
    with pytest.raises(EngineUnavailable):
        await waiting
    server.close()


async def test_the_routing_key_travels_as_a_header(client: EngineClient, fake_engine: FakeEngine) -> None:
    await sample(client, routing_key="session-7")
    assert fake_engine.headers[0]["X-SMG-Routing-Key"] == "session-7"


async def test_closing_the_generator_hangs_up(client: EngineClient, fake_engine: FakeEngine) -> None:
    fake_engine.enqueue(Reply([5, 6, 7], hold_after=1))
    stream = client.generate(rid="r" * 32, input_ids=[1], sampling_params={})
    assert (await anext(stream)).output_ids == [5]
    await stream.aclose()
    await fake_engine.until(lambda: fake_engine.disconnected == ["r" * 32])
