"""Versions that engines prepare before they pause: exact, by any source, whoever dies in whichever phase."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.configs.publish_config import PublishConfig
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import RequestError
from agentrl.proxy.engines.delivery import preparations
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.proxy.engines.tensor_transfer import members
from agentrl.proxy.engines.version_delivery import Delivery
from agentrl.store import engine_claims

from .prepared_fleet import PreparedFleet, paths

PREPARE, PAUSE, SWAP, CONTINUE = "/agentrl/prepare", "/pause_generation", "/agentrl/swap", "/continue_generation"
LOAD = "/update_weights_from_disk"


async def test_an_engine_prepares_pauses_swaps_and_goes_on(fleet: PreparedFleet) -> None:
    version = fleet.write()
    delivery = Delivery(digests=fleet.digests(version), n_bytes=1000)
    fleet.replicas.engine("a", fleet.urls[0]).saw_steps(0.01)
    facts = await fleet.publish(version, delivery=delivery)
    for engine in fleet.engines:
        assert paths(engine) == [PREPARE, PAUSE, SWAP, CONTINUE]
        assert fleet.has(engine, version)
    assert fleet.run_version == version
    assert facts["transport"] == dict.fromkeys(fleet.urls, "prepared")
    assert facts["source"] == dict.fromkeys(fleet.urls, "host")  # the folder is used in place
    assert facts["fetched"] == dict.fromkeys(fleet.urls, 0)
    assert facts["verified"] == dict.fromkeys(fleet.urls, len(delivery.digests))
    assert facts["prepared_s"].keys() == facts["stall_s"].keys() == set(fleet.urls)
    assert facts["unverified"] == {}
    assert facts["stall_steps"] == {fleet.urls[0]: pytest.approx(facts["stall_s"][fleet.urls[0]] / 0.01)}


async def test_an_engine_whose_calls_are_aborted_swaps_too(fleet: PreparedFleet) -> None:
    fleet.replicas.pools["a"].updates.pause_mode = "abort"
    facts = await fleet.publish(fleet.write())
    for engine in fleet.engines:
        assert engine.calls[1:3] == [(PAUSE, {"mode": "abort"}), (PAUSE, {"mode": "retract"})]
        assert paths(engine) == [PREPARE, PAUSE, PAUSE, SWAP, CONTINUE]
        assert fleet.has(engine, 1)
    assert facts["transport"] == dict.fromkeys(fleet.urls, "prepared")


async def test_engines_serve_while_they_prepare_and_no_replica_claims_them(fleet: PreparedFleet) -> None:
    for engine in fleet.engines:
        engine.stager.holding = True
    publication = fleet.publish(fleet.write())
    for engine in fleet.engines:
        await engine.until(lambda engine=engine: PREPARE in paths(engine))  # type: ignore[misc]
    await fleet.replicas.round()
    assert [fleet.replicas.states(url) for url in fleet.urls] == [["serving"] * 2] * 4
    assert {fleet.replicas.row(url).updater for url in fleet.urls} == {None}
    assert not any(engine.paused for engine in fleet.engines)
    fleet.engines[0].stager.holding = False
    await fleet.engines[0].until(lambda: fleet.has(fleet.engines[0], 1))  # it does not wait for the others
    assert fleet.run_version == 0
    for engine in fleet.engines:
        engine.stager.holding = False
    await publication
    assert fleet.run_version == 1


async def test_an_engine_that_cannot_prepare_or_fails_to_loads_the_folder(fleet: PreparedFleet) -> None:
    plain = await fleet.join(cache=None)
    await fleet.settle()
    fleet.engines[0].stager.fail_next_stage = "no memory for a second copy"
    facts = await fleet.publish(fleet.write())
    by = dict.fromkeys(fleet.urls, "prepared") | {plain.url: "disk", fleet.engines[0].url: "disk"}
    assert facts["transport"] == by
    assert fleet.has(fleet.engines[0], 1)
    assert plain.version == "1"
    clients = [engine.client for engine in fleet.replicas.pools["a"].engines]
    found = {each["url"]: each["prepares"] for each in await members(clients, 8, prepare=True)}
    assert found == {url: url != plain.url for url in fleet.urls}


async def test_a_swap_that_stops_in_the_middle_is_followed_by_a_load_in_the_same_pause(fleet: PreparedFleet) -> None:
    fleet.engines[0].stager.fail_next_swap = "out of memory"
    facts = await fleet.publish(fleet.write())
    assert paths(fleet.engines[0]) == [PREPARE, PAUSE, "/agentrl/swap", LOAD, CONTINUE]
    assert facts["transport"][fleet.urls[0]] == "disk"
    assert all(fleet.has(engine, 1) for engine in fleet.engines)


async def test_an_engine_with_other_tensors_than_the_trainers_does_not_swap(fleet: PreparedFleet) -> None:
    version = fleet.write()
    digests = {**fleet.digests(version), "w.f32": "0" * 64}
    with pytest.raises(RequestError, match=r"no engine took version 1.*w.f32 has digest"):
        await fleet.publish(version, delivery=Delivery(digests=digests))
    assert SWAP not in {path for engine in fleet.engines for path in paths(engine)}


@pytest.mark.parametrize("phase", ["staging", "swap"])
async def test_an_engine_that_dies_is_ejected_and_comes_back_with_the_version(fleet: PreparedFleet, phase: str) -> None:
    fleet.engines[1].stager.dies_at = phase  # type: ignore[assignment]
    fleet.write()
    facts = await fleet.publish(fleet.write(whole=False))
    assert sorted(facts["stall_s"]) == sorted(set(fleet.urls) - {fleet.urls[1]})
    assert fleet.run_version == 2
    fleet.engines[1].stager.dies_at = None
    fleet.engines[1].start()
    await fleet.settle()
    assert all(fleet.has(engine, 2) for engine in fleet.engines)
    assert LOAD not in paths(fleet.engines[1])


async def test_an_engine_that_joins_or_missed_versions_prepares_the_runs_version(fleet: PreparedFleet) -> None:
    fleet.write()
    missed = fleet.engines[2]
    missed.stop()
    for _ in range(3):
        await fleet.publish(fleet.write(whole=False))
    missed.start()
    joined = await fleet.join()
    await fleet.settle()
    assert all(fleet.has(engine, 4) for engine in (missed, joined))
    assert paths(joined) == [PREPARE, PAUSE, SWAP, CONTINUE]


async def test_another_replica_repairs_what_a_killed_one_left_paused(
    fleet: PreparedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica is stopped after it has paused an engine, before the engine has swapped."""
    fleet.write()
    stopped, at_swap = asyncio.Event(), asyncio.Event()
    really = SGLangClient.swap

    async def swap(client: SGLangClient, *args: object, **kwargs: object) -> float:
        at_swap.set()
        if not stopped.is_set():
            await stopped.wait()
        return await really(client, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(SGLangClient, "swap", swap)
    killed = fleet.publish(1)
    await at_swap.wait()
    fleet.replicas.database.transact(engine_claims.expire_claims, fleet.replicas.run_id, "a")
    (paused,) = [engine for engine in fleet.engines if engine.paused]
    stopped.set()
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await killed
    await fleet.publish(1, "b")
    await fleet.settle()
    assert all(fleet.has(engine, 1) for engine in fleet.engines)
    assert paths(paused).count(CONTINUE) >= 1
    assert {fleet.replicas.row(url).updater for url in fleet.urls} == {None}


async def test_two_replicas_that_publish_one_version_swap_each_engine_once(fleet: PreparedFleet) -> None:
    version = fleet.write()
    await asyncio.gather(fleet.publish(version, "a"), fleet.publish(version, "b"))
    assert [paths(engine).count(SWAP) for engine in fleet.engines] == [1] * 4
    assert all(fleet.has(engine, version) for engine in fleet.engines)


async def test_a_newer_version_replaces_one_that_is_prepared(fleet: PreparedFleet) -> None:
    for engine in fleet.engines:
        engine.stager.holding = True
    old = fleet.publish(fleet.write(), "a")
    await fleet.engines[0].until(lambda: PREPARE in paths(fleet.engines[0]))
    for engine in fleet.engines:
        engine.stager.holding = False
    new = fleet.publish(fleet.write(), "b")
    await asyncio.wait([old, new])
    await new
    await fleet.settle()
    assert fleet.run_version in (1, 2)
    assert all(fleet.has(engine, fleet.run_version) for engine in fleet.engines)


async def test_a_preparation_that_takes_too_long_is_given_up(
    fleet: PreparedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.engines[0].stager.holding = True
    prepared = fleet.replicas.pools["a"].preparations
    assert prepared is not None
    prepared.timeout_s = 0.5
    facts = await fleet.publish(fleet.write())
    assert facts["transport"] == {url: "disk" if url == fleet.urls[0] else "prepared" for url in fleet.urls}
    fleet.engines[0].stager.holding = False
    assert fleet.has(fleet.engines[0], 1)


@pytest.mark.parametrize("n_versions", [40, pytest.param(200, marks=pytest.mark.long)])
async def test_digests_are_exact_after_many_versions_while_engines_die_and_join(
    fleet: PreparedFleet, n_versions: int
) -> None:
    """Anchors come now and then; an engine that is dead misses versions, and one that joins has the base weights."""
    draw = random.Random(n_versions)
    for version in range(1, n_versions + 1):
        stopped = []
        fleet.write(whole=version == 1 or draw.random() < 0.1)
        for engine in draw.sample(fleet.engines[1:], draw.choice([0, 0, 1, 2])):
            engine.stop()
            stopped.append(engine)
        if draw.random() < 0.1 and len(fleet.engines) < 6:
            await fleet.join()
        if draw.random() < 0.1:
            draw.choice(fleet.engines).stager.fail_next_swap = "stops in the middle"
        await fleet.publish(version, draw.choice("ab"))
        for engine in stopped:
            engine.start()
        if draw.random() < 0.5:  # else they miss the next version too
            await fleet.settle()
            assert all(fleet.has(engine, version) for engine in fleet.engines)
    await fleet.settle()
    assert all(fleet.has(engine, n_versions) for engine in fleet.engines)


class TestWithoutASharedDisk:
    """The recorded folder exists on no host but the trainer's; versions are in object storage."""

    @pytest.fixture
    async def apart(self, fleet: PreparedFleet, monkeypatch: pytest.MonkeyPatch) -> PreparedFleet:
        """Each engine is on a host of its own, and one host at a time reads the storage."""
        monkeypatch.setattr(preparations, "host_of", lambda engine: engine.url)
        fleet.recorded = fleet.root.with_name("on-the-trainers-host")
        for pool in fleet.replicas.pools.values():
            assert pool.preparations is not None
            places = replace(pool.preparations._places, storage_url=f"file://{fleet.root}")
            config = PublishConfig(parallel=1, fan_out=2)
            pool.preparations = pool.updates._preparations = Preparations.of(config, places)
            pool.updates._records._folders._places = places
        return fleet

    async def test_engines_read_from_each_other(self, apart: PreparedFleet) -> None:
        facts = await apart.publish(apart.write())
        assert sorted(facts["source"].values()) == ["origin", "origin", "peer", "peer"]
        assert all(n_bytes > 0 for n_bytes in facts["fetched"].values())
        apart.write(whole=False)
        changed = await apart.publish(apart.write(whole=False))
        assert max(changed["fetched"].values()) < min(facts["fetched"].values())
        assert all(apart.has(engine, 3) for engine in apart.engines)

    async def test_garbage_from_a_peer_is_refused_and_another_source_is_used(self, apart: PreparedFleet) -> None:
        """Whatever an engine's host sends has other bytes than the version's manifest says."""
        version = apart.write()
        for engine in apart.engines:
            assert engine._host is not None
            engine._host.files._shelves = [_Damaged(apart.root)]
        facts = await apart.publish(version)
        assert all(apart.has(engine, version) for engine in apart.engines)
        assert set(facts["transport"].values()) == {"prepared"}

    async def test_an_engine_that_cannot_prepare_says_what_to_set(self, apart: PreparedFleet) -> None:
        """It does not see the proxy's cache, in which the delta was made whole."""
        apart.write()
        plain = await apart.join(cache=None)
        await apart.settle()
        plain.fail_next_update = "no such folder"
        await apart.publish(apart.write(whole=False))
        error = apart.replicas.engine("a", plain.url).error
        assert error is not None
        assert "set publish.delta: never" in error
        assert apart.replicas.engine("a", plain.url).state is EngineState.DEAD
        await apart.settle()  # here it does see the cache
        assert plain.version == "2"


class _Damaged:
    """A shelf of files with other bytes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate(self, name: str, file: str) -> Path | None:
        path = self._root / name / file
        if not path.is_file() or file == "version.json":
            return path if path.is_file() else None
        other = self._root.with_name("garbage") / file
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"x" * path.stat().st_size)
        return other

    def awaits(self, name: str, file: str) -> bool:
        return False
