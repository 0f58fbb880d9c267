"""Adapters are unloaded once no call can use them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.proxy.engines import adapters
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.testing import FakeEngine, Reply

from .adapter_pool import Store, answer, probe, publish, spans


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes until every replica has noticed."""
    monkeypatch.setattr(adapters, "SLACK_S", 0.0)


async def loaded_after_probes(pool: EnginePool, fake: FakeEngine) -> list[str]:
    for _ in range(3):  # the first one notices
        await probe(pool)
        await asyncio.sleep(0.01)
    return list(fake.adapters)


@pytest.mark.usefixtures("at_once")
async def test_an_adapter_is_unloaded_once_no_call_can_use_it(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    store.began = [time.time()]  # a call, here or at another replica
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v1-step", "v2-step"]
    store.began = [time.time()]  # it has ended, and a later one began
    assert await loaded_after_probes(pool, fakes[0]) == ["v2-step"]
    await publish(pool, store, 3)
    store.began = []
    assert await loaded_after_probes(pool, fakes[0]) == ["v3-step"]
    assert spans(await answer(pool)) == [(3, 0, 4)]


async def test_an_older_adapter_stays_loaded_for_a_grace_period(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v1-step", "v2-step"]


@pytest.mark.usefixtures("at_once")
async def test_a_restarted_replica_unloads_only_its_predecessors_adapters(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, tmp_path: Path
) -> None:
    pool = make(fakes[0])
    for version in (1, 2):
        await publish(pool, store, version)
    fakes[0].adapters |= {"v1-other": str(tmp_path.parent / "v1-other"), "mine": str(tmp_path / "mine")}
    assert await loaded_after_probes(make(fakes[0]), fakes[0]) == ["v2-step", "v1-other", "mine"]


@pytest.mark.usefixtures("at_once")
async def test_a_version_that_is_being_published_elsewhere_stays(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    ours, theirs = make(fakes[0]), make(fakes[0])
    await publish(ours, store, 1)
    await theirs.load(theirs.engines[0], 2)
    assert await loaded_after_probes(ours, fakes[0]) == ["v1-step", "v2-step"]


@pytest.mark.usefixtures("at_once")
async def test_after_a_rollback_the_older_version_serves_again(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    for version in (1, 2, 1):
        await publish(pool, store, version)
    assert spans(await answer(pool)) == [(1, 0, 4)]
    await publish(pool, store, 3)
    assert await loaded_after_probes(pool, fakes[0]) == ["v3-step"]


@pytest.mark.usefixtures("at_once")
async def test_an_engine_that_keeps_a_caller_waiting_is_not_dead(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that slept through the change still uses the adapter; its call is not disturbed."""
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 0.01)
    pool, asleep = make(fakes[0]), make(fakes[0])
    await publish(pool, store, 1)
    await probe(asleep)
    fakes[0].enqueue(Reply([5, 6, 2], hold_after=1))
    under_way = asyncio.create_task(answer(asleep))
    await fakes[0].until(lambda: fakes[0].holding == 1)
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v2-step"]
    assert pool.engines[0].state is EngineState.SERVING
    fakes[0].release()
    assert spans(await under_way) == [(1, 0, 3)]
