"""Aborts, pauses and broken connections of calls under way."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.domain.schemas import VersionSpan
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.errors import EngineError, EngineUnavailable

from .servers import LONG, PROMPT, collect, n_tokens, rid


async def test_abort_ends_the_stream_and_keeps_the_tokens(client: EngineClient) -> None:
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.abort(name)
    assert chunks[-1].finish_reason == "abort"
    assert 2 <= n_tokens(chunks) < 1000
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=n_tokens(chunks))]


async def test_abort_while_retracted_keeps_the_tokens(client: EngineClient) -> None:
    """Nothing is sampled between the pause and the abort: what is said of the weights holds."""
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.pause("retract")
            await client.abort_all()
    assert await client.paused()  # it ends although nothing goes on
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=n_tokens(chunks))]
    assert n_tokens(chunks) < 1000
    await client.continue_generation()


async def test_abort_before_the_first_token(client: EngineClient) -> None:
    await client.pause("retract")
    waiting = asyncio.create_task(collect(client, LONG))
    while not (await asyncio.wait([waiting], timeout=0.05))[0]:  # where it waits, it cannot be seen
        await client.abort_all()
        await client.continue_generation()
    chunks = waiting.result()
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].versions == ([VersionSpan(version=0, start=0, end=n)] if (n := n_tokens(chunks)) else [])


async def test_an_engine_reports_whether_it_is_paused(client: EngineClient) -> None:
    assert not await client.paused()
    await client.pause("in_place")
    assert await client.paused()
    await client.continue_generation()


async def test_hanging_up_interrupts_requests_under_way(client: EngineClient) -> None:
    stream = client.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG)
    await anext(stream)
    client.hang_up()
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    assert await client.health() is Health.SERVING


async def test_abort_of_an_unknown_request_is_harmless(client: EngineClient) -> None:
    await client.abort(rid())
    assert await client.health() is Health.SERVING


async def test_a_paused_engine_is_not_dead_and_holds_requests(client: EngineClient) -> None:
    await client.pause("retract")
    assert await client.health() is Health.PAUSED
    waiting = asyncio.create_task(collect(client, {"max_new_tokens": 2, "ignore_eos": True}))
    assert (await client.model_info()).weight_version == 0
    assert not waiting.done()
    await client.continue_generation()
    assert n_tokens(await waiting) == 2
    assert await client.health() is Health.SERVING


async def test_continue_without_pause_is_harmless(client: EngineClient) -> None:
    await client.continue_generation()
    assert await client.health() is Health.SERVING


async def test_the_deadline_holds_while_paused(client: EngineClient) -> None:
    await client.pause("retract")
    with pytest.raises(EngineError, match="did not answer within"):
        async for _ in client.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG, timeout_s=0.5):
            pass
    await client.continue_generation()
