"""The fake engine keeps its own promises (what it shares with SGLang is in engine/contract/)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from agentrl.domain.schemas import VersionSpan
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineDied, EngineUnavailable
from agentrl.testing import FakeEngine, Reply, spans_of


@pytest.fixture
async def client(fake_engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as http:
        made = SGLangClient(fake_engine.url, http)
        yield made
        made.close()


async def sample(client: EngineClient, ids: list[int], rid: str = "r" * 32) -> list[Chunk]:
    params = {"max_new_tokens": 5}
    return [chunk async for chunk in client.generate(rid=rid, input_ids=ids, sampling_params=params)]


def ids_of(chunks: list[Chunk]) -> list[list[int]]:
    return [chunk.output_ids for chunk in chunks]


async def test_replies_come_in_order_then_the_default(fake_engine: FakeEngine, client: EngineClient) -> None:
    fake_engine.enqueue([7, 8], Reply([9, 9, 9, 2], chunks=[3, 1], logprobs=[-1, -2, -3, -4]))
    assert ids_of(await sample(client, [1])) == [[7], [8]]
    second = await sample(client, [1])
    assert ids_of(second) == [[9, 9, 9], [2]]
    assert [chunk.logprobs for chunk in second] == [[-1, -2, -3], [-4]]
    assert ids_of(await sample(client, [1, 2])) == ids_of(await sample(client, [1, 2]))
    assert [request["input_ids"] for request in fake_engine.requests] == [[1], [1], [1, 2], [1, 2]]


async def test_a_cleared_engine_has_no_requests_and_no_replies(fake_engine: FakeEngine, client: EngineClient) -> None:
    default = ids_of(await sample(client, [1]))
    fake_engine.enqueue([7], [8])
    assert ids_of(await sample(client, [1])) == [[7]]
    fake_engine.clear()
    assert (fake_engine.requests, fake_engine.headers, fake_engine.calls) == ([], [], [])
    assert ids_of(await sample(client, [1])) == default


async def test_the_budget_cuts_a_reply(fake_engine: FakeEngine, client: EngineClient) -> None:
    fake_engine.enqueue([3, 4, 5, 6, 7, 8, 9])
    chunks = await sample(client, [1])
    assert ids_of(chunks) == [[3], [4], [5], [6], [7]]
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("hold_after", [0, 1, 3])
async def test_a_held_reply_sees_what_happens_meanwhile(
    fake_engine: FakeEngine, client: EngineClient, tmp_path: Path, hold_after: int
) -> None:
    fake_engine.enqueue(Reply([5, 6, 7], hold_after=hold_after))
    answer = asyncio.ensure_future(sample(client, [1]))
    await fake_engine.until(lambda: fake_engine.holding == 1)
    await client.pause("retract")
    await client.update_weights_from_disk(tmp_path, 1)
    await client.continue_generation()
    fake_engine.release()
    spans = (await answer)[-1].versions
    before = [VersionSpan(version=0, start=0, end=hold_after)] if hold_after else []
    after = [VersionSpan(version=1, start=hold_after, end=3)] if hold_after < 3 else []
    assert spans == before + after


async def test_scripted_versions_replace_the_engines_version(fake_engine: FakeEngine, client: EngineClient) -> None:
    fake_engine.enqueue(Reply([5, 6], versions=[3, 4]))
    spans = (await sample(client, [1]))[-1].versions
    assert spans == [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]


async def test_a_failed_update_is_scripted_once(fake_engine: FakeEngine, client: EngineClient, tmp_path: Path) -> None:
    fake_engine.fail_next_update = "disk on fire"
    with pytest.raises(Exception, match="disk on fire"):
        await client.update_weights_from_disk(tmp_path, 1)
    await client.update_weights_from_disk(tmp_path, 2)
    assert fake_engine.version == "2"


async def test_the_fake_engine_restarts_with_base_weights(
    fake_engine: FakeEngine, client: EngineClient, tmp_path: Path
) -> None:
    await client.update_weights_from_disk(tmp_path, 5)
    fake_engine.enqueue(Reply([5, 6], hold_after=1))
    answer = asyncio.ensure_future(sample(client, [1]))
    await fake_engine.until(lambda: fake_engine.holding == 1)
    url = fake_engine.url
    fake_engine.stop()
    with pytest.raises(EngineUnavailable):
        await answer
    fake_engine.start()
    assert fake_engine.url == url
    assert (await client.model_info()).weight_version == 0


async def test_ids_out_of_vocabulary_kill_the_fake_engine_as_they_kill_sglang() -> None:
    with FakeEngine(vocab_size=100) as engine:
        async with aiohttp.ClientSession() as http:
            with closing(SGLangClient(engine.url, http)) as client:
                with pytest.raises(EngineUnavailable):
                    await sample(client, [100])
                with pytest.raises(EngineUnavailable):
                    await sample(client, [1])


async def test_a_number_of_more_than_32_bits_kills_the_fake_engine_as_it_kills_sglang(
    fake_engine: FakeEngine, client: EngineClient
) -> None:
    with pytest.raises(EngineDied):
        await anext(client.generate(rid="r" * 32, input_ids=[1], sampling_params={"top_k": 2**31}))
    assert await client.health() is Health.DEAD


def test_equal_versions_in_a_row_form_a_span() -> None:
    assert spans_of([]) == []
    assert spans_of(["0", "0", "1"]) == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": 3},
    ]


@pytest.mark.parametrize(
    "calls",
    [
        ["resume_weights"],
        ["release_memory", "release_memory"],
        ["release_memory", "continue_generation"],
        ["release_memory", "resume_weights", "resume_cache", "continue_generation"],
    ],
)
async def test_a_call_to_released_memory_kills_the_fake_engine_as_it_kills_sglang(
    client: EngineClient, fake_engine: FakeEngine, calls: list[str]
) -> None:
    await client.pause("retract")
    for call in calls[:-1]:
        await getattr(client, call)()
    with pytest.raises(EngineUnavailable):
        await getattr(client, calls[-1])()
    assert await client.health() is Health.DEAD
    fake_engine.start()  # with its memory
    assert not fake_engine.released
    assert not fake_engine.undefined


async def test_a_release_during_a_call_kills_the_fake_engine(client: EngineClient, fake_engine: FakeEngine) -> None:
    fake_engine.enqueue(Reply([5, 6], hold_after=1))
    answer = asyncio.ensure_future(sample(client, [1]))
    await fake_engine.until(lambda: fake_engine.holding == 1)
    with pytest.raises(EngineUnavailable):
        await client.release_memory()
    with pytest.raises(EngineDied):
        await answer
