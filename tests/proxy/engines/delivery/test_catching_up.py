"""Engines that are behind the run: how far they may be, when they change, and what no one ever serves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from replica_fleet import ReplicaFleet

from agentrl.domain.schemas import Json, VersionState
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.version_delivery import BY_FOLDER, EngineBusy, Loaded
from agentrl.store import Connection, engine_claims
from agentrl.store.tables import weight_versions
from agentrl.store.training import publishes, trainer_epochs
from agentrl.testing import FakeEngine

from .prepared_fleet import PreparedFleet, paths

LAG = 2


@pytest.fixture
async def fleet(replicas: ReplicaFleet, places: VersionPlaces, start: Callable[..., FakeEngine]) -> PreparedFleet:
    """Four engines, each with a call of a session at a, that may be two versions behind."""
    replicas.places = places
    replicas.limits = replace(replicas.limits, lag=LAG)
    made = PreparedFleet(replicas, places.weights, start)
    await made.begin(4)
    for engine in engines(made):
        engine.running = 1
    return made


@dataclass
class Publishing:
    """A publish by b that changes engines once it may `go_on`; `load` does so at once."""

    publication: asyncio.Task[Json]
    go_on: asyncio.Event
    load: Callable[..., Awaitable[Loaded]]


def engines(fleet: PreparedFleet, name: str = "a") -> list[Engine]:
    return sorted(fleet.replicas.pools[name].engines, key=lambda engine: engine.url)


def versions(fleet: PreparedFleet) -> list[int]:
    return [int(engine.version) for engine in fleet.engines]


def roll_back(fleet: PreparedFleet, version: int) -> None:
    def change(conn: Connection) -> None:
        mine = weight_versions.c.run_id == fleet.replicas.run_id
        row = weight_versions.update().where(mine, weight_versions.c.version == version)
        conn.execute(row.values(state=VersionState.ROLLED_BACK))

    fleet.replicas.database.transact(change)


def new_epoch(fleet: PreparedFleet) -> int:
    return fleet.replicas.database.transact(trainer_epochs.begin_epoch, fleet.replicas.run_id)


async def move(fleet: PreparedFleet, name: str = "a") -> list[str]:
    """The engines that a replica moves now; one watches all of them here."""
    await fleet.replicas.read(name)
    pool = fleet.replicas.pools[name]
    for engine in pool.engines:
        engine.mine = True
    return await pool.catching_up.once(pool.engines)


async def test_the_run_moves_while_engines_finish_their_calls(fleet: PreparedFleet) -> None:
    facts = await fleet.publish(fleet.write())
    assert (fleet.run_version, versions(fleet)) == (1, [0] * 4)
    assert facts["transport"] == dict.fromkeys(fleet.urls, "kept")
    assert all(paths(engine) == ["/agentrl/prepare"] for engine in fleet.engines)  # ready, and not paused
    await fleet.replicas.round()
    assert [fleet.replicas.states(url) for url in fleet.urls] == [["serving"] * 2] * 4
    assert versions(fleet) == [0] * 4


async def test_the_publish_that_needs_an_engine_changes_it(fleet: PreparedFleet) -> None:
    for version in (1, 2, 3, 4):
        fleet.write()
        await fleet.publish(version)
        await fleet.replicas.read("a")
        assert min(versions(fleet)) >= version - LAG
    assert versions(fleet) == [3] * 4  # changed by the publish of version 3, and within the lag of 4
    assert all(fleet.has(engine, 3) for engine in fleet.engines)


async def test_an_idle_engine_changes_at_once_and_a_busy_one_when_its_calls_have_ended(fleet: PreparedFleet) -> None:
    await fleet.publish(fleet.write())
    engines(fleet)[1].running = 0
    assert await move(fleet) == [fleet.urls[1]]
    assert versions(fleet) == [0, 1, 0, 0]
    assert fleet.has(fleet.engines[1], 1)
    assert await move(fleet) == []
    fleet.replicas.pools["a"].release(engines(fleet)[3])
    assert fleet.replicas.pools["a"].catching_up.called.is_set()
    assert await move(fleet) == [fleet.urls[3]]


async def test_if_all_are_busy_the_least_loaded_engine_changes_and_takes_the_new_sessions(
    fleet: PreparedFleet,
) -> None:
    await fleet.publish(fleet.write())
    for engine, running in zip(engines(fleet), (3, 2, 4, 3), strict=True):
        engine.running = running
    assert await move(fleet) == [fleet.urls[1]]
    assert await move(fleet) == []
    pool = fleet.replicas.pools["a"]
    chosen = [await pool.acquire(f"new-{n}", asyncio.get_running_loop().time() + 10) for n in range(4)]
    assert {engine.url for engine in chosen} == {fleet.urls[1]}


async def test_the_watch_moves_engines(fleet: PreparedFleet) -> None:
    pool = fleet.replicas.pools["a"]
    await fleet.publish(fleet.write())
    for engine in pool.engines:
        engine.running = 0
    watch = asyncio.create_task(pool.watch())
    async with asyncio.timeout(60):
        while not all(fleet.has(engine, 1) for engine in fleet.engines):  # noqa: ASYNC110  engines in other threads
            await asyncio.sleep(0.01)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


async def until_ready(fleet: PreparedFleet, version: int) -> None:
    async with asyncio.timeout(60):
        for engine in engines(fleet):
            while not ((found := await engine.client.preparation()) and found.is_ready(f"v{version}-a")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def publishing(fleet: PreparedFleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Publishing]:
    """The run is at version 2, all engines serve version 0 and have prepared version 3, which b is publishing."""
    for _ in range(2):
        await fleet.publish(fleet.write())
    pool, go_on = fleet.replicas.pools["b"], asyncio.Event()
    load = pool.load

    async def held(*args: Any) -> Loaded:
        await go_on.wait()
        return await load(*args)

    monkeypatch.setattr(pool, "load", held)
    publication = fleet.publish(fleet.write(), "b")
    await until_ready(fleet, 3)
    yield Publishing(publication, go_on, load)
    go_on.set()
    await publication
    assert fleet.run_version == 3
    assert set(versions(fleet)) <= {2, 3}


async def test_an_engine_that_has_the_version_of_a_publish_under_way_keeps_it(
    fleet: PreparedFleet, publishing: Publishing
) -> None:
    await publishing.load(engines(fleet, "b")[1], 3)
    engines(fleet)[1].running = 0
    assert fleet.urls[1] not in await move(fleet)
    assert versions(fleet) == [0, 3, 0, 0]


async def test_an_engine_that_gets_the_version_of_a_publish_before_it_is_claimed_keeps_it(
    fleet: PreparedFleet, publishing: Publishing
) -> None:
    await publishing.load(engines(fleet, "b")[1], 3)
    pool = fleet.replicas.pools["a"]
    with pytest.raises(EngineBusy, match="version 3"):
        await pool.catch_up(engines(fleet)[1], 2, BY_FOLDER, None)
    assert versions(fleet) == [0, 3, 0, 0]
    assert fleet.replicas.row(fleet.urls[1]).updater is None


async def test_an_engine_that_has_prepared_a_newer_version_waits_for_its_publish(
    fleet: PreparedFleet, publishing: Publishing
) -> None:
    engines(fleet)[1].running = 0
    orders = paths(fleet.engines[1]).count("/agentrl/prepare")
    for _ in range(2):
        await move(fleet)
    assert versions(fleet) == [0] * 4
    assert paths(fleet.engines[1]).count("/agentrl/prepare") == orders
    publishing.go_on.set()
    facts = await publishing.publication
    assert facts["transport"] == dict.fromkeys(fleet.urls, "prepared")


async def test_what_an_abandoned_publish_has_prepared_is_waited_for_no_longer_than_an_update_may_take(
    fleet: PreparedFleet, publishing: Publishing
) -> None:
    engines(fleet)[1].running = 0
    preparations = fleet.replicas.pools["a"].preparations
    assert preparations is not None
    preparations.timeout_s = 1.0
    async with asyncio.timeout(60):
        while versions(fleet) == [0] * 4:
            await move(fleet)
            await asyncio.sleep(0.05)
    assert versions(fleet) == [0, 2, 0, 0]


async def test_an_engine_that_is_no_longer_prepared_loads_the_version_when_it_is_idle(fleet: PreparedFleet) -> None:
    plain = await fleet.join(cache=None)
    await fleet.settle()
    await fleet.publish(fleet.write())
    assert (await move(fleet), plain.version) == ([plain.url], "1")  # it has no calls


async def test_an_engine_outside_the_lag_is_updated_by_a_probe(fleet: PreparedFleet) -> None:
    for version in (1, 2, 3):
        fleet.write()
        if version == 2:
            fleet.engines[0].stop()
        await fleet.publish(version)
    fleet.engines[0].start()  # with the base weights
    await fleet.settle()
    assert fleet.has(fleet.engines[0], 3)


async def test_a_version_that_was_rolled_back_is_never_a_target(fleet: PreparedFleet) -> None:
    await fleet.publish(fleet.write())
    engines(fleet)[0].running = 0
    await move(fleet)
    roll_back(fleet, 1)
    engines(fleet)[1].running = 0
    assert await move(fleet) == []
    assert versions(fleet) == [1, 0, 0, 0]
    await fleet.publish(0, epoch=new_epoch(fleet))  # the trainer goes back to its checkpoint
    await fleet.replicas.round()
    assert versions(fleet) == [0] * 4


async def test_a_rolled_back_version_is_left_by_the_publish_that_takes_its_place(fleet: PreparedFleet) -> None:
    for version in (1, 2):
        fleet.write()
        await fleet.publish(version)
    for engine in engines(fleet)[:2]:
        engine.running = 0
    for _ in range(2):  # three quarters of them serve
        await move(fleet)
    assert versions(fleet) == [2, 2, 0, 0]
    roll_back(fleet, 2)
    await fleet.publish(1, epoch=new_epoch(fleet))
    assert fleet.run_version == 1
    assert versions(fleet) == [1, 1, 0, 0]


async def test_what_a_killed_replica_left_paused_gets_the_runs_version(
    fleet: PreparedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.publish(fleet.write())
    engines(fleet)[0].running = 0
    at_swap, never = asyncio.Event(), asyncio.Event()

    async def hang(client: SGLangClient, *args: object, **kwargs: object) -> float:
        at_swap.set()
        await never.wait()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(SGLangClient, "swap", hang)
        killed = asyncio.create_task(move(fleet))
        await at_swap.wait()
        fleet.replicas.database.transact(engine_claims.expire_claims, fleet.replicas.run_id, "a")
        assert fleet.engines[0].paused
    await fleet.replicas.round("b")
    await fleet.replicas.round("b")
    assert fleet.has(fleet.engines[0], 1)
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await killed


async def test_the_bound_holds_whoever_publishes_dies_rolls_back_or_moves(fleet: PreparedFleet) -> None:
    """After each publish every engine that serves has the run's version or one that it may be behind."""
    draw = random.Random(5)
    for version in range(1, 25):
        fleet.write(whole=version == 1 or draw.random() < 0.2)
        dead = draw.choice([None, None, *fleet.engines])
        if dead is not None:
            dead.stop()
        await fleet.publish(version, draw.choice("ab"))
        _check_bound(fleet, version, dead)
        if dead is not None:
            dead.start()
        await fleet.replicas.round()
        for engine in engines(fleet):
            engine.running = draw.randrange(3)
        await move(fleet, draw.choice("ab"))
        _check_bound(fleet, version, dead)
    for engine in (*engines(fleet), *engines(fleet, "b")):
        engine.running = 0
    await fleet.settle()
    while await move(fleet):
        pass
    assert all(fleet.has(engine, 24) for engine in fleet.engines)


def _check_bound(fleet: PreparedFleet, version: int, dead: FakeEngine | None) -> None:
    database, run_id = fleet.replicas.database, fleet.replicas.run_id
    kept = database.query(publishes.within_lag, run_id, version, LAG) | {version}
    assert min(kept) == max(0, version - LAG)
    assert {int(engine.version) for engine in fleet.engines if engine is not dead} <= kept
