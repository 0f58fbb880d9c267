"""Answers whose engine dies or loads new weights: which tokens are kept, and with which version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.errors import EngineUnavailable
from agentrl.proxy.calls.sampling.sample_segment import Interrupted, Sampled
from agentrl.proxy.calls.sampling.sampling import WHOLE_INTERVAL, SampleRequest, sample
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines.pool import EnginePool
from agentrl.testing import FakeEngine, Reply

from .pool_setup import Store, eventually, soon, states

PARAMS: Json = {"max_new_tokens": 10, "temperature": 1.0, "stop_token_ids": [2]}


async def answer(pool: EnginePool, **options: Any) -> Sampled:
    sampled = Sampled()
    told: list[int] = []
    await sample(
        pool,
        sampled,
        lambda tokens: told.extend(tokens.ids),
        SampleRequest(
            session_id="s",
            rid="r" * 32,
            prompt_ids=TokenIds([1]),
            params=PARAMS,
            deadline=soon(),
            **options,
        ),
    )
    assert told == sampled.output_ids
    return sampled


def spans(sampled: Sampled) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sampled.spans]


@pytest.fixture
async def alone(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EnginePool]:
    """A pool of one engine, watched."""
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.02)
    pool = make(fakes[0].url)
    watch = asyncio.create_task(pool.watch())
    await eventually(lambda: states(pool) == ["serving"])
    yield pool
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


async def test_whole_answers_come_in_few_events(alone: EnginePool, fakes: list[FakeEngine]) -> None:
    await answer(alone)
    await answer(alone, whole=True)
    asked = [request["sampling_params"].get("stream_interval") for request in fakes[0].requests]
    assert asked == [None, WHOLE_INTERVAL]
    assert "stream_interval" not in PARAMS


async def test_tokens_of_a_dead_engine_are_kept(alone: EnginePool, fakes: list[FakeEngine]) -> None:
    fakes[0].enqueue(Reply([5, 6, 7, 8], drop_after=2), [7, 8, 2])
    sampled = await answer(alone)
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 7, 8, 2], [(0, 0, 5)])
    assert fakes[0].requests[1]["sampling_params"]["max_new_tokens"] == 8


async def test_an_answer_whose_engine_died_after_the_last_token_is_complete(
    alone: EnginePool, fakes: list[FakeEngine]
) -> None:
    fakes[0].enqueue(Reply([5, 2], drop_after=2))
    sampled = await answer(alone)
    assert (sampled.output_ids, sampled.finish_reason, spans(sampled)) == ([5, 2], "stop", [(0, 0, 2)])
    assert len(fakes[0].requests) == 1


async def test_an_answer_is_interrupted_if_weights_changed_before_the_engine_died(
    alone: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """What was sent after the update may have been sampled before it."""
    fakes[0].enqueue(Reply([5, 6, 7, 8], hold_after=1, drop_after=3))
    asking = asyncio.create_task(answer(alone))
    await fakes[0].until(lambda: fakes[0].holding == 1)
    store.pending = {1}
    await alone.load(alone.engines[0], 1)
    fakes[0].release()
    with pytest.raises(Interrupted, match="which weights"):
        await asking


async def test_an_answer_is_interrupted_if_a_newer_version_was_rolled_back(
    alone: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.was_undone = True
    fakes[0].enqueue(Reply([5, 6, 7, 8], drop_after=2))
    with pytest.raises(Interrupted, match="which weights"):
        await answer(alone)


@pytest.mark.parametrize("label", [0, "default"])
async def test_a_restart_between_two_probes_samples_nothing(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, label: int | str
) -> None:
    store.version = 3
    pool = make(fakes[0].url)
    await pool.probe(pool.engines[0])
    fakes[0].base_version = label  # type: ignore[assignment]
    fakes[0].stop()
    fakes[0].start()
    with suppress(EngineUnavailable):  # the connection that was kept open is gone
        await pool.engines[0].client.pause()
    await pool.engines[0].client.continue_generation()
    fakes[0].enqueue([5, 2], [6, 2])
    asking = asyncio.create_task(answer(pool))
    await eventually(lambda: states(pool) == ["dead"])
    await pool.probe(pool.engines[0])
    sampled = await asking
    assert (sampled.output_ids, spans(sampled)) == ([6, 2], [(3, 0, 2)])


async def test_many_publishes_may_abort_one_answer(alone: EnginePool, fakes: list[FakeEngine]) -> None:
    """As long as each segment brings something."""
    fakes[0].enqueue(*[Reply([5], finish_reason="abort") for _ in range(9)])
    sampled = await answer(alone)
    assert sampled.output_ids[:9] == [5] * 9
    fakes[0].enqueue(*[Reply([], finish_reason="abort") for _ in range(9)])
    with pytest.raises(Interrupted, match="in a row"):
        await answer(alone)
