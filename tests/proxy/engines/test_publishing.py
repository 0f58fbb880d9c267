"""A publish updates a share of the engines at once; an engine that is slow, dead or refuses delays no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from replica_fleet import ReplicaFleet
from serving import add_version

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import VersionState
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import FencedError, RequestError, StoreError
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.delivery.wave_run import Pace
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.tensor_transfer import Broadcast, members
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery
from agentrl.proxy.run_store import RunStore
from agentrl.store import engine_claims, runs
from agentrl.store.tables import weight_versions
from agentrl.store.training import publishes, trainer_epochs
from agentrl.testing import FakeEngine

N = 8
"""Engines: two of them are updated at once."""
UPDATE = "/update_weights_from_disk"


class Updates:
    """Weight updates as engines receive them. Those of `held` URLs wait until `let_go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.running: set[str] = set()
        self.begun: list[str] = []
        self.most = 0
        self.held: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._really = SGLangClient.update_weights_from_disk
        patch.setattr(SGLangClient, "update_weights_from_disk", self._patched())

    def _patched(self) -> Any:
        async def update(client: SGLangClient, *args: Any, **kwargs: Any) -> None:
            self.running.add(client.url)
            self.begun.append(client.url)
            self.most = max(self.most, len(self.running))
            self._changed.set()
            try:
                if client.url in self.held:
                    await self.held[client.url].wait()
                await self._really(client, *args, **kwargs)
            finally:
                self.running.discard(client.url)
                self._changed.set()

        return update

    def hold(self, *urls: str) -> None:
        self.held |= {url: asyncio.Event() for url in urls}

    def let_go(self) -> None:
        for event in self.held.values():
            event.set()
        self.held = {}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Updates:
    return Updates(monkeypatch)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(N)]


@pytest.fixture
async def urls(replicas: ReplicaFleet, engines: list[FakeEngine], tmp_path: Path) -> list[str]:
    """The engines' URLs, in the order of updates. All serve at a and b; versions 1 and 2 are durable."""
    for name in ("a", "b"):
        replicas.add(name, silent_s=0.0)
    await replicas.join(*(engine.url for engine in engines))
    for _ in range(2):
        await replicas.round()
    found = sorted(engine.url for engine in replicas.pools["a"].engines)
    engines.sort(key=lambda engine: found.index(engine.url))
    for version in (1, 2):
        add_version(replicas.database, replicas.run_id, version, tmp_path)
    return found


def publish(
    replicas: ReplicaFleet, name: str, version: int = 1, epoch: int | None = None, delivery: Delivery = BY_FOLDER
) -> asyncio.Task[Any]:
    pool, store = replicas.pools[name], replicas.stores[name]
    return asyncio.create_task(publishing.publish(store, pool, version, epoch, delivery))


def run_version(replicas: ReplicaFleet) -> int:
    return int(replicas.database.query(runs.get, replicas.run_id).current_version)


def versions(engines: list[FakeEngine]) -> list[str]:
    return [str(engine.version) for engine in engines]


def loads(engine: FakeEngine) -> int:
    return [path for path, _ in engine.calls].count(UPDATE)


async def ended(replicas: ReplicaFleet, urls: list[str]) -> None:
    """Waits until the store has the ends of the updates of these engines."""
    async with asyncio.timeout(60):
        while any((row := replicas.row(url)).updater or row.version != 1 for url in urls):  # noqa: ASYNC110 - polls a table
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("limit", "at_once"), [(32, 2), (1, 1)])
async def test_a_share_is_updated_at_once_and_the_others_serve(replicas, engines, urls, updates, limit, at_once):
    pool = replicas.pools["a"]
    pool.pace = Pace(parallel=limit)
    updates.hold(*urls)
    publication = publish(replicas, "a")
    await updates.until(lambda: len(updates.running) == at_once)
    serving = [engine for engine in pool.engines if engine.state is EngineState.SERVING]
    assert len(serving) == N - at_once
    updates.let_go()
    facts = await publication
    assert updates.most == at_once
    assert sorted(facts["stall_s"]) == sorted(urls)
    assert versions(engines) == ["1"] * N
    assert run_version(replicas) == 1


async def test_each_engine_is_paused_loads_reports_the_version_and_goes_on_in_this_order(replicas, engines, urls):
    await publish(replicas, "a")
    for engine in engines:
        assert [path for path, _ in engine.calls] == ["/pause_generation", UPDATE, "/continue_generation"]


async def test_statements_of_a_publish(replicas, engines, urls, updates):
    """An engine's claim, its states and the claim's end are a statement each at most; the rest is for all engines."""
    updates.hold(*urls)
    replicas.counts.take()
    publication = publish(replicas, "a")
    await updates.until(lambda: len(updates.running) == 2)
    updates.let_go()
    await publication
    _, statements = replicas.counts.take()
    assert statements <= 4 * N + 13


async def test_probes_during_a_publish_ask_once_which_version_to_serve(replicas, engines, urls, updates):
    updates.hold(urls[-1])
    publication = publish(replicas, "a")
    await updates.until(lambda: len(updates.begun) == N and updates.running == {urls[-1]})
    await ended(replicas, urls[:-1])
    await replicas.round("b")  # reads that the others have the version
    await replicas.read("b")
    replicas.counts.take()
    for engine in replicas.pools["b"].due():
        await replicas.pools["b"].probe(engine)
    requests, statements = replicas.counts.take()
    assert requests == 2 * (N - 1)
    assert statements <= 4
    updates.let_go()
    await publication


async def test_a_slow_engine_delays_the_runs_move_and_no_other_engine(replicas, engines, urls, updates):
    updates.hold(urls[0])
    publication = publish(replicas, "a")
    await updates.until(lambda: len(updates.begun) == N and updates.running == {urls[0]})
    assert versions(engines) == ["0", *["1"] * (N - 1)]
    assert run_version(replicas) == 0
    updates.let_go()
    await publication
    assert run_version(replicas) == 1


@pytest.mark.parametrize("fault", ["dead", "refuses"])
async def test_an_engine_that_fails_is_ejected_and_the_others_get_the_version(replicas, engines, urls, fault):
    if fault == "dead":
        engines[3].stop()
    else:
        engines[3].fail_next_update = "no"
    facts = await publish(replicas, "a")
    assert sorted(facts["stall_s"]) == sorted(set(urls) - {urls[3]})
    assert replicas.engine("a", urls[3]).state is EngineState.DEAD
    assert run_version(replicas) == 1
    if fault == "dead":
        engines[3].start()
    else:
        assert engines[3].paused  # its weights are undefined
    await replicas.round()
    assert versions(engines) == ["1"] * N
    assert replicas.states(urls[3])[0] == "serving"


async def test_a_fault_of_the_store_ends_the_publish_when_the_updates_under_way_have_finished(
    replicas, engines, urls, updates, monkeypatch
):
    records, fourth = replicas.pools["a"].updates._records, replicas.engine("a", urls[3])
    claim, failed = records.claim, asyncio.Event()

    async def flaky(engine: Engine, seconds: float) -> str | None:
        if engine is fourth:
            failed.set()
            raise StoreError("disk is full")
        return await claim(engine, seconds)

    monkeypatch.setattr(records, "claim", flaky)
    updates.hold(urls[0])
    publication = publish(replicas, "a")
    await failed.wait()
    updates.let_go()
    with pytest.raises(StoreError, match="disk is full"):
        await publication
    assert versions(engines) == ["1"] * 3 + ["0"] * (N - 3)
    assert not any(engine.paused for engine in engines)
    assert run_version(replicas) == 0
    monkeypatch.setattr(records, "claim", claim)
    await publish(replicas, "a")
    assert versions(engines) == ["1"] * N
    assert [loads(engine) for engine in engines] == [1] * N
    assert run_version(replicas) == 1


async def test_another_replica_finishes_what_a_killed_one_began(replicas, engines, urls, updates):
    updates.hold(*urls[4:6])
    killed = publish(replicas, "a")  # it goes no further, and releases nothing
    await updates.until(lambda: updates.running == set(urls[4:6]))
    updates.held = {}
    replicas.database.transact(engine_claims.expire_claims, replicas.run_id, "a")
    config = RunConfig.model_validate({"name": "r", "model": "tiny", "agent": "a:B", "tasks": "t"})
    replicas.database.transact(_roll_back, replicas.run_id, 2)  # the newest version is 1
    await publishing.resume(replicas.stores["b"], replicas.pools["b"], config)
    assert versions(engines) == ["1"] * N
    assert not any(engine.paused for engine in engines)
    assert [loads(engine) for engine in engines] == [1] * N
    assert run_version(replicas) == 1
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await killed
    assert not any(engine.paused for engine in engines)
    assert {replicas.row(url).updater for url in urls} == {None}


def _roll_back(conn, run_id, version):
    mine = (weight_versions.c.run_id == run_id) & (weight_versions.c.version == version)
    conn.execute(weight_versions.update().where(mine).values(state=VersionState.ROLLED_BACK))


async def test_two_publishes_of_one_version_load_each_engine_once(replicas, engines, urls):
    one, other = await asyncio.gather(publish(replicas, "a"), publish(replicas, "b"))
    assert [loads(engine) for engine in engines] == [1] * N
    assert sorted(one["stall_s"]) == sorted(other["stall_s"]) == sorted(urls)
    assert run_version(replicas) == 1


async def test_the_publish_of_an_old_trainer_does_not_move_the_run_back(replicas, engines, urls, updates):
    old = replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    updates.hold(*urls[:2])
    first = publish(replicas, "a", 1, old)
    await updates.until(lambda: updates.running == set(urls[:2]))
    new = replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    second = publish(replicas, "b", 2, new)
    updates.let_go()
    with pytest.raises(FencedError):
        await first
    await second
    assert run_version(replicas) == 2
    for _ in range(2):
        await replicas.round()
    assert versions(engines) == ["2"] * N
    assert {state for url in urls for state in replicas.states(url)} == {"serving"}


async def test_a_publish_whose_trainer_was_replaced_goes_to_no_further_engine(replicas, engines, urls, updates):
    old = replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    updates.hold(*urls[:2])
    publication = publish(replicas, "a", 1, old)
    await updates.until(lambda: updates.running == set(urls[:2]))
    replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    await replicas.read("a")
    updates.let_go()
    with pytest.raises(FencedError, match="epoch 1 is over: epoch 2 has started"):
        await publication
    assert versions(engines) == ["1"] * 2 + ["0"] * (N - 2)
    assert not any(engine.paused for engine in engines)


async def test_a_late_publish_of_the_same_trainer_does_not_move_the_run_back(replicas, engines, urls, monkeypatch):
    """Replica a is slow to record the publish: the trainer has repeated it at b, and published the next version."""
    epoch = replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    late, on = asyncio.Event(), asyncio.Event()
    write = RunStore.write

    async def slow(store: RunStore, change: Any, *args: Any) -> Any:
        if store is replicas.stores["a"] and change is publishes.complete:
            late.set()
            await on.wait()
        return await write(store, change, *args)

    monkeypatch.setattr(RunStore, "write", slow)
    first = publish(replicas, "a", 1, epoch)
    await late.wait()
    await publish(replicas, "b", 1, epoch)
    await publish(replicas, "b", 2, epoch)
    on.set()
    with pytest.raises(StoreError, match="version 1 is older than the run's version 2"):
        await first
    assert run_version(replicas) == 2
    with pytest.raises(RequestError, match="the run has version 2") as refused:
        await publish(replicas, "a", 1, epoch)
    assert (refused.value.status, refused.value.code) == (409, "version_overtaken")
    assert versions(engines) == ["2"] * N


async def test_a_late_publish_goes_to_no_further_engine(replicas, engines, urls, updates):
    epoch = replicas.database.transact(trainer_epochs.begin_epoch, replicas.run_id)
    updates.hold(*urls[:2])
    first = publish(replicas, "a", 1, epoch)
    await updates.until(lambda: updates.running == set(urls[:2]))
    held, updates.held = updates.held, {}
    replicas.database.transact(engine_claims.expire_claims, replicas.run_id, "a")
    for version in (1, 2):
        await publish(replicas, "b", version, epoch)
    await replicas.read("a")
    for event in held.values():
        event.set()
    with pytest.raises(StoreError, match="the run has version 2"):
        await first
    assert versions(engines)[2:] == ["2"] * (N - 2)
    assert run_version(replicas) == 2
    for _ in range(2):
        await replicas.round()
    assert versions(engines) == ["2"] * N


async def test_the_members_of_a_transfer_are_asked_together_up_to_the_limit(replicas, engines, urls, monkeypatch):
    engines[2].stop()
    asked, most, really = 0, 0, SGLangClient.tensor_ranks
    full = asyncio.Event()

    async def counted(client: SGLangClient) -> int:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        if asked == 3:
            full.set()
        await full.wait()
        try:
            return await really(client)
        finally:
            asked -= 1

    monkeypatch.setattr(SGLangClient, "tensor_ranks", counted)
    found = await members([engine.client for engine in replicas.pools["a"].engines], 3)
    assert sorted(each["url"] for each in found) == [url for url in urls if url != urls[2]]
    assert most == 3


async def test_the_members_of_a_broadcast_are_updated_together(replicas, engines, urls, updates):
    updates.hold(*urls)
    broadcast = Broadcast.model_construct(transport="distributed", ranks={})  # it reaches none of them
    publication = publish(replicas, "a", delivery=Delivery(broadcast))
    await updates.until(lambda: len(updates.running) == N)
    updates.let_go()
    await publication
    assert versions(engines) == ["1"] * N
