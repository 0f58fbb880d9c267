"""Versions as adapters: published while engines sample on, and named by each call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineError
from agentrl.proxy.engines.pool import EnginePool
from agentrl.testing import FakeEngine, Reply

from .adapter_pool import Store, answer, paths, probe, publish, spans, states


async def test_base_weights_need_no_adapter(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    assert spans(await answer(pool)) == [(0, 0, 4)]
    assert "lora_path" not in (fakes[0].requests + fakes[1].requests)[0]
    assert [fake.calls for fake in fakes] == [[], []]


async def test_a_publish_pauses_no_engine_and_calls_keep_their_adapter(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    pool = make(fakes[0])
    await probe(pool)
    await publish(pool, store, 1)
    fakes[0].enqueue(Reply([5, 6, 7, 2], hold_after=2))
    under_way = asyncio.create_task(answer(pool))
    await fakes[0].until(lambda: fakes[0].holding == 1)
    await publish(pool, store, 2)
    assert spans(await answer(pool)) == [(2, 0, 4)]
    fakes[0].release()
    assert spans(await under_way) == [(1, 0, 4)]
    assert [request["lora_path"] for request in fakes[0].requests] == ["v1-step", "v2-step"]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_another_replica_follows_once_the_run_has_moved(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    ours, theirs = make(fakes[0]), make(fakes[0])
    await probe(ours)
    await publish(theirs, store, 1)
    await probe(ours)
    store.pending = {2}
    await theirs.load(theirs.engines[0], 2)
    await probe(ours)
    assert ours.engines[0].version == 1
    assert spans(await answer(ours)) == [(1, 0, 4)]
    store.version, store.pending = 2, set()
    await probe(ours)
    assert spans(await answer(ours)) == [(2, 0, 4)]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_a_restarted_engine_gets_the_adapter_before_it_serves(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 3)
    fakes[0].stop()
    await probe(pool)
    assert states(pool) == ["dead", "serving"]
    fakes[0].start()
    assert fakes[0].adapters == {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert list(fakes[0].adapters) == ["v3-step"]


async def test_a_restart_between_two_probes_samples_nothing(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    pool = make(fakes[0])
    await publish(pool, store, 3)
    fakes[0].stop()
    fakes[0].start()
    with suppress(EngineError):  # the connection that was kept open is gone
        await pool.engines[0].client.model_info()
    asking = asyncio.create_task(answer(pool))
    while states(pool) != ["dead"]:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert "has lost adapter v3-step" in (pool.engines[0].error or "")
    await pool.probe(pool.engines[0])
    assert spans(await asking) == [(3, 0, 4)]


async def test_tokens_of_a_dead_engine_are_kept_after_a_publish(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Each part of the answer is of the adapter that it named."""
    await publish(pool, store, 1)
    home = await pool.acquire("s", time.monotonic() + 1)
    pool.release(home)
    first, second = fakes if home is pool.engines[0] else fakes[::-1]
    first.enqueue(Reply([5, 6, 7, 2], hold_after=2, drop_after=3))
    second.enqueue([9, 2])
    asking = asyncio.create_task(answer(pool))
    await first.until(lambda: first.holding == 1)
    await publish(pool, store, 2)
    first.release()
    sampled = await asking
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 7, 9, 2], [(1, 0, 3), (2, 3, 5)])


async def test_an_engine_that_refuses_an_adapter_keeps_the_one_it_has(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    fakes[0].fail_next_update = "no such tensor"
    with pytest.raises(EngineError, match="no such tensor"):
        await pool.load(pool.engines[0], 2)
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert [list(fake.adapters) for fake in fakes] == [["v1-step"], ["v1-step"]]
    assert spans(await answer(pool)) == [(1, 0, 4)]


async def test_an_engine_that_cannot_load_the_adapter_serves_after_it_can(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    store.version, fakes[0].fail_next_update = 2, "the disk is away"
    await probe(pool)
    assert states(pool) == ["dead", "serving"]
    assert "the disk is away" in (pool.engines[0].error or "")
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert list(fakes[0].adapters) == ["v1-step", "v2-step"]


async def test_an_engine_without_room_for_adapters_says_so(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    fakes[0].takes_adapters = False
    store.version = 1
    pool = make(fakes[0])
    await probe(pool)
    assert states(pool) == ["dead"]
    assert "--enable-lora" in (pool.engines[0].error or "")


async def test_two_replicas_can_load_an_adapter_at_once(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is told that the name is taken; it must not unload what it finds."""
    pool = make(fakes[0])
    load = SGLangClient.load_adapter

    async def overtaken(client: SGLangClient, name: str, path: str) -> None:
        await load(client, name, path)
        await load(client, name, path)

    monkeypatch.setattr(SGLangClient, "load_adapter", overtaken)
    await publish(pool, store, 1)
    assert list(fakes[0].adapters) == ["v1-step"]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_whole_weights_of_another_run_give_way_to_the_base_first(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    fakes[0].version = "12"
    store.version = 3
    pool = make(fakes[0])
    await probe(pool)
    assert states(pool) == ["serving"]
    assert (fakes[0].version, fakes[0].model_path) == ("0", str(store.root))
    assert spans(await answer(pool)) == [(3, 0, 4)]


async def test_an_engine_left_paused_continues_with_the_adapter(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    await pool.engines[0].client.pause()
    store.claimed, store.left = {fakes[0].url: "other"}, {fakes[0].url}
    await probe(pool)
    assert states(pool) == ["updating", "serving"]
    store.claimed = {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert not fakes[0].paused


async def test_an_adapter_is_loaded_while_another_replica_claims_the_engine(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Nothing is changed that both could change."""
    store.claimed = {fake.url: "other" for fake in fakes}
    await publish(pool, store, 1)
    assert spans(await answer(pool)) == [(1, 0, 4)]
    store.version = 2
    await probe(pool)
    assert spans(await answer(pool)) == [(2, 0, 4)]


async def test_a_publish_waits_while_another_replica_changes_the_weights(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.claimed = {fakes[0].url: "other"}
    fakes[0].version = "7"
    await probe(pool)
    assert states(pool) == ["updating", "serving"]
    assert "/pause_generation" not in [path for path, _ in fakes[0].calls]
    store.claimed = {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert fakes[0].version == "0"
