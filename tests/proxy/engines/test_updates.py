"""Updates of an engine's weights: claimed by one replica, repaired by the next, and failed after their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines import updates
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import Delivery
from agentrl.testing import FakeEngine, Reply

from .pool_setup import Store, eventually, states


def hang(patch: pytest.MonkeyPatch, method: str) -> None:
    """The client's method does not return, and the time of the update under way is over when it is called."""
    limits: list[asyncio.Timeout] = []

    def timeout_at(when: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout_at(when))
        return limits[-1]

    async def forever(*_: Any, **__: Any) -> None:
        limits[-1].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    patch.setattr(updates, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout_at": timeout_at}))
    patch.setattr(SGLangClient, method, forever)


async def test_an_engine_that_another_replica_updates_is_left_alone(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Paused is not dead."""
    store.claimed[fakes[0].url] = "other"
    await pool.engines[0].client.pause()
    calls = len(fakes[0].calls)
    await pool.probe(pool.engines[0])
    assert states(pool) == ["updating", "serving"]
    assert pool.engines[0].paused
    assert len(fakes[0].calls) == calls
    await pool.engines[0].client.continue_generation()
    await pool.probe(pool.engines[0])  # not yet released, and whole
    assert states(pool) == ["serving", "serving"]


async def test_an_engine_that_was_left_paused_is_repaired(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.claimed[fakes[0].url] = "gone"
    await pool.engines[0].client.pause()
    await pool.probe(pool.engines[0])
    assert states(pool) == ["updating", "serving"]
    store.claimed[fakes[0].url] = ""  # its time is over
    await pool.probe(pool.engines[0])
    assert states(pool) == ["serving", "serving"]
    assert [path for path, _ in fakes[0].calls].count("/update_weights_from_disk") == 1
    assert not fakes[0].paused
    assert store.claimed == {}


async def test_an_engine_left_by_an_unfinished_publish_gets_the_runs_version(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """It may have been left because it has other weights than the label says."""
    store.pending = {1}
    await pool.load(pool.engines[0], 1)
    await pool.engines[0].client.pause()
    store.claimed[fakes[0].url] = ""
    await pool.probe(pool.engines[0])
    assert (states(pool)[0], fakes[0].version, fakes[0].paused) == ("serving", "0", False)


async def test_an_engine_that_starts_or_was_paused_by_hand_is_left_alone(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.version = 3
    await pool.engines[0].client.pause()
    for _ in range(2):
        await pool.probe(pool.engines[0])
        assert states(pool) == ["updating", "serving"]
        assert [path for path, _ in fakes[0].calls] == ["/pause_generation"]
    monkeypatch.setattr(updates, "CLEANING_UP_S", -1e9)  # for too long: a run that is no more may have left it
    await pool.probe(pool.engines[0])
    assert states(pool) == ["serving", "serving"]
    assert (fakes[0].version, fakes[0].paused) == ("3", False)


async def test_an_update_that_another_replica_has_just_finished_is_not_repeated(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused when it was asked, and is at work again when it is ours to change."""
    store.claimed[fakes[0].url] = ""
    await pool.engines[0].client.pause()
    claim = store.claim

    async def claimed_late(engine: Engine, seconds: float) -> str | None:
        await pool.engines[0].client.continue_generation()
        return await claim(engine, seconds)

    monkeypatch.setattr(store, "claim", claimed_late)
    await pool.probe(pool.engines[0])
    assert states(pool) == ["serving", "serving"]
    assert "/update_weights_from_disk" not in [path for path, _ in fakes[0].calls]


async def test_a_publish_waits_for_a_replica_that_updates_the_engine(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "POLL_S", 0.01)
    store.claimed[fakes[0].url] = "other"
    loading = asyncio.create_task(pool.load(pool.engines[0], 1))
    await asyncio.sleep(0.05)
    assert (loading.done(), fakes[0].calls) == (False, [])
    store.claimed.clear()
    assert (await loading).transport == "disk"
    store.claimed[fakes[0].url] = "other"
    pool.updates.timeout_s = -updates.CLEANING_UP_S
    with pytest.raises(EngineError, match="is updated by other"):
        await pool.load(pool.engines[0], 2)


async def test_a_claim_is_released_when_the_store_answers_again(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves meanwhile, and a watch that is cancelled just then ends."""
    release = store.release

    async def away(engine: Engine, *, whole: bool) -> None:
        raise StoreError("away")

    monkeypatch.setattr(store, "release", away)
    fakes[0].update_takes_s = 60.0
    store.version = 3
    watch = asyncio.create_task(pool.watch())
    await eventually(lambda: fakes[0].paused)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(watch, 120)
    fakes[0].update_takes_s = 0.0
    await pool.probe(pool.engines[0])
    assert (states(pool)[0], fakes[0].version, store.claimed[fakes[0].url]) == ("serving", "3", "me")
    monkeypatch.setattr(store, "release", release)
    await pool.probe(pool.engines[0])
    assert fakes[0].url not in store.claimed


async def test_an_engine_that_does_not_continue_was_not_updated(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        hang(patch, "continue_generation")
        with pytest.raises(EngineUnavailable, match="was not updated in"):
            await pool.load(pool.engines[0], 1)
    assert (fakes[0].paused, store.claimed) == (True, {fakes[0].url: ""})


async def test_a_publish_does_not_wait_for_a_dead_engine_that_is_claimed(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.claimed[fakes[0].url] = "gone"
    fakes[0].stop()
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(pool.load(pool.engines[0], 1), 120)


async def test_after_a_failed_update_an_engine_stays_paused_for_every_replica(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Unknown weights sample nothing: what waits is aborted, what comes waits, and who looks next repairs them."""
    fakes[0].enqueue(Reply([5, 6, 7], hold_after=1))
    stream = pool.engines[0].client.generate(rid="r" * 32, input_ids=[1], sampling_params={})
    assert (await anext(stream)).output_ids == [5]
    store.version, fakes[0].fail_next_update = 3, "half of it is gone"
    await pool.probe(pool.engines[0])
    assert states(pool) == ["dead", "serving"]
    (last,) = [chunk async for chunk in stream]
    assert (last.output_ids, last.finish_reason) == ([], "abort")
    assert fakes[0].paused
    assert store.claimed == {fakes[0].url: ""}
    other = EnginePool([engine.client for engine in pool.engines], store)
    await other.probe(other.engines[0])
    assert states(other) == ["serving", "dead"]
    assert (fakes[0].version, fakes[0].paused) == ("3", False)


async def test_a_version_that_is_being_published_is_left_in_place(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.pending = {1}
    await pool.load(pool.engines[0], 1)
    await pool.probe(pool.engines[0])
    assert [fake.version for fake in fakes] == ["1", 0]


async def test_an_engine_that_has_a_version_is_not_given_it_again(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    first, again = [await pool.load(pool.engines[0], 1) for _ in range(2)]
    assert (first.transport, again.transport, again.stall_s) == ("disk", "none", 0.0)
    assert [path for path, _ in fakes[0].calls].count("/update_weights_from_disk") == 1
    fakes[0].paused = True  # by somebody who did not go on
    assert (await pool.load(pool.engines[0], 1)).transport == "disk"
    assert not fakes[0].paused


async def test_an_engine_that_has_a_version_is_compared_with_the_trainer(
    pool: EnginePool, fakes: list[FakeEngine]
) -> None:
    await pool.load(pool.engines[0], 1)  # as a replica that finishes a publish does: without digests
    fakes[0].digests = {"a": "1"}
    same = await pool.load(pool.engines[0], 1, Delivery(digests={"a": "1", "b": "2"}))
    assert (same.transport, same.verified) == ("none", 1)
    with pytest.raises(EngineError, match="a has digest 1, not 3"):
        await pool.load(pool.engines[0], 1, Delivery(digests={"a": "3"}))
    assert [path for path, _ in fakes[0].calls].count("/update_weights_from_disk") == 2
    assert fakes[0].paused


async def test_an_update_that_takes_too_long_has_failed(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(fakes[0].url)
    await pool.probe(pool.engines[0])
    with monkeypatch.context() as patch:
        hang(patch, "update_weights_from_disk")
        with pytest.raises(EngineUnavailable, match=rf"was not updated in {pool.updates.timeout_s:g} s"):
            await pool.load(pool.engines[0], 1)
    assert fakes[0].paused
    assert (await pool.load(pool.engines[0], 1)).transport == "disk"
    assert not fakes[0].paused


async def test_loading_an_older_version_flushes_the_cache(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    """Of what is cached for the older version newer weights may have computed a part."""
    pool.updates.pause_mode, pool.updates.keeps_cache = "in_place", True
    for version in (1, 3, 2):
        await pool.load(pool.engines[0], version)
    modes = [body["mode"] for path, body in fakes[0].calls if path == "/pause_generation"]
    flushed = [body["flush_cache"] for path, body in fakes[0].calls if path == "/update_weights_from_disk"]
    assert modes == ["in_place", "in_place", "retract"]
    assert flushed == [False, False, True]


async def test_publishing_to_a_dead_engine_does_not_wait(
    pool: EnginePool, fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(updates, "PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(pool.engines[0].client, "model_info", forever)
    with pytest.raises(EngineUnavailable):
        await pool.load(pool.engines[0], 1)
    assert fakes[0].calls == []
