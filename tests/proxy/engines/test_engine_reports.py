"""What replicas tell each other about engines: who probes, who is believed, and what a cut-off replica can do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from replica_fleet import ReplicaFleet
from serving import add_version

from agentrl.engine.chunks import Adapter
from agentrl.proxy.engines import engine_reports
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.store import engine_claims, fleet, heartbeats
from agentrl.testing import FakeEngine

NAMES = ["a", "b", "c", "d"]


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(8)]


async def all_serve(replicas: ReplicaFleet, names: list[str], engines: list[FakeEngine]) -> list[str]:
    """Start replicas, let engines join, and wait until all serve everywhere; the engines' URLs."""
    for name in names:
        replicas.add(name)
    urls = [engine.url for engine in engines]
    await replicas.join(*urls)
    for _ in range(2):
        await replicas.round()
    for name in names:
        await replicas.read(name)
    assert {state for url in urls for state in replicas.states(url)} == {"serving"}
    return urls


def not_watching(replicas: ReplicaFleet, url: str) -> list[str]:
    return [name for name in replicas.pools if name not in replicas.watchers(url)]


@pytest.mark.parametrize("n_engines", [2, 8])
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
async def test_requests_grow_with_the_engines_alone_and_statements_with_the_replicas_alone(
    replicas, engines, n_engines, n_replicas
):
    names = NAMES[:n_replicas]
    await all_serve(replicas, names, engines[:n_engines])
    replicas.counts.take()
    for name in names:
        await replicas.read(name)
        for engine in replicas.pools[name].due():
            await replicas.pools[name].probe(engine)
    requests, statements = replicas.counts.take()
    assert requests == 2 * n_engines * min(2, n_replicas)
    assert statements == 3 * n_replicas


async def test_a_read_returns_only_what_changed(replicas, engines, monkeypatch):
    monkeypatch.setattr(fleet, "OVERLAP_S", 0.0)
    urls = await all_serve(replicas, NAMES, engines)
    read = fleet.news
    found: list[list[str]] = []

    def counted(*args: Any) -> Any:
        news = read(*args)
        found.append([member.url for member in news.members])
        return news

    monkeypatch.setattr(fleet, "news", counted)
    await replicas.read("a")
    replicas.database.transact(engine_claims.set_draining, replicas.run_id, urls[3], True, "x")
    await replicas.read("a")
    await replicas.read("a")
    assert found == [[], [urls[3]], []]
    assert replicas.engine("a", urls[3]).draining


async def test_one_failed_call_takes_a_dead_engine_from_every_replica_at_its_next_read(replicas, engines):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    (caller, *others) = not_watching(replicas, url)
    engines[0].stop()
    await replicas.fails(caller, url)
    assert replicas.engine(caller, url).state == "dead"
    for name in [*others, *replicas.watchers(url)]:
        await replicas.read(name)
    assert set(replicas.states(url)) == {"dead"}
    await replicas.round()
    assert set(replicas.states(url)) == {"dead"}
    engines[0].start()
    await replicas.round()
    await replicas.round()
    assert set(replicas.states(url)) == {"serving"}


async def test_calls_that_fail_together_are_reported_in_one_write(replicas, engines):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    caller = not_watching(replicas, url)[0]
    engines[0].stop()
    before = replicas.row(url).changes
    await asyncio.gather(*(replicas.fails(caller, url, times=5) for _ in range(20)))
    assert (replicas.row(url).state, replicas.row(url).changes) == ("dead", before + 1)


async def test_calls_of_several_replicas_that_fail_together_are_reported_once(replicas, engines):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    engines[0].stop()
    before = replicas.row(url).changes
    await asyncio.gather(*(replicas.fails(name, url) for name in NAMES))
    assert (replicas.row(url).state, replicas.row(url).changes) == ("dead", before + 1)
    assert set(replicas.states(url)) == {"dead"}


async def test_a_replica_that_is_cut_off_takes_a_healthy_engine_from_the_others_once_and_for_a_moment(
    replicas, engines
):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    caller = not_watching(replicas, url)[0]
    replicas.cuts[caller].add(url)
    await replicas.fails(caller, url)
    assert replicas.row(url).state == "dead"
    watcher = replicas.watchers(url)[0]
    await replicas.round(watcher)
    assert (replicas.row(url).state, replicas.row(url).seen_by) == ("serving", watcher)
    changes = replicas.row(url).changes
    for _ in range(5):
        await replicas.round()
        await replicas.fails(caller, url)
    assert replicas.row(url).changes == changes  # it keeps off the engine, and says nothing
    assert [name for name in NAMES if replicas.engine(name, url).state != "serving"] == [caller]
    replicas.cuts[caller].clear()
    await replicas.round()
    assert set(replicas.states(url)) == {"serving"}


async def test_a_watcher_that_is_cut_off_is_outvoted_by_the_other(replicas, engines):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    bad, good = replicas.watchers(url)
    replicas.cuts[bad].add(url)
    await replicas.round(bad)
    assert replicas.row(url).state == "dead"
    await replicas.round(good)
    changes = replicas.row(url).changes
    for _ in range(5):
        await replicas.round()
    assert (replicas.row(url).state, replicas.row(url).changes) == ("serving", changes)
    assert [name for name in NAMES if replicas.engine(name, url).state != "serving"] == [bad]
    engines[0].stop()  # really, this time
    await replicas.round(good)
    assert replicas.row(url).state == "dead"


async def test_a_replica_that_is_outvoted_again_is_quiet_for_longer(replicas, engines):
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    bad, good = replicas.watchers(url)
    replicas.cuts[bad].add(url)
    quiet = []
    for _ in range(3):
        await replicas.round(bad)
        assert replicas.row(url).state == "dead"
        await replicas.round(good)
        await replicas.read(bad)
        engine = replicas.engine(bad, url)
        quiet.append(engine.quiet_s)
        engine.quiet_until = 0.0  # the time is over
    assert quiet == [engine_reports.QUIET_S * factor for factor in (1, 2, 4)]


async def test_an_outvoted_replica_is_heard_again_when_the_other_is_gone(replicas, engines):
    (url, *_) = await all_serve(replicas, ["a", "b"], engines[:2])
    replicas.cuts["a"].add(url)
    await replicas.round("a")
    await replicas.round("b")
    await replicas.round("a")
    assert replicas.row(url).state == "serving"
    del replicas.pools["b"]
    for _ in range(int(pools.SILENT_S) + 2):
        replicas.pools["a"]._live._time += 1.0  # a second without a heartbeat of b
        await replicas.round("a")
    assert replicas.row(url).state == "dead"  # alone, it decides alone


async def test_a_replica_that_is_cut_off_from_all_engines_takes_a_quarter_at_most_at_a_time(replicas, engines):
    urls = await all_serve(replicas, ["a", "b"], engines)
    replicas.cuts["a"] |= set(urls)
    for _ in range(3):
        await replicas.round("a")
        assert sum(replicas.row(url).state == "dead" for url in urls) == len(urls) // engine_reports.SHARE
        await replicas.round("b")
        assert {replicas.row(url).state for url in urls} == {"serving"}
    for url in urls:
        assert replicas.states(url) == ["dead", "serving"]


async def test_engines_that_die_together_are_all_found_dead(replicas, engines):
    urls = await all_serve(replicas, ["a", "b", "c"], engines)
    for engine in engines:
        engine.stop()
    for _ in range(3):
        await replicas.round()
    assert {replicas.row(url).state for url in urls} == {"dead"}


async def test_the_engines_of_a_replica_that_dies_get_another_watcher(replicas, engines):
    urls = await all_serve(replicas, NAMES, engines)
    assert {len(replicas.watchers(url)) for url in urls} == {2}
    del replicas.pools["a"]
    for _ in range(int(pools.SILENT_S) + 2):
        for name in replicas.pools:
            replicas.pools[name]._live._time += 1.0
        await replicas.round()
    assert {len(replicas.watchers(url)) for url in urls} == {2}


async def test_a_replica_that_ends_hands_over_at_once(replicas, engines):
    urls = await all_serve(replicas, NAMES, engines)
    about = {**replicas.pools.pop("a").about(), "ended": True}
    replicas.database.transact(heartbeats.beat, replicas.run_id, "proxy", "a", about)
    await replicas.round()
    assert {len(replicas.watchers(url)) for url in urls} == {2}


async def test_replicas_with_lists_of_their_own_watch_their_lists(replicas, engines):
    urls = [engine.url for engine in engines]
    for name, listed in (("a", urls[:2]), ("b", urls[2:4]), ("c", urls[2:4]), ("d", urls[2:4])):
        replicas.add(name, listed)
    for _ in range(2):
        await replicas.round()
    assert [engine.mine for engine in replicas.pools["a"].engines] == [True, True]
    for url in urls[2:4]:
        assert len([n for n in "bcd" if replicas.engine(n, url).mine]) == 2
    await replicas.round()
    assert {engine.state for pool in replicas.pools.values() for engine in pool.engines} == {"serving"}


async def test_an_engine_that_another_replica_updates_is_not_probed(replicas, engines):
    (url, *_) = await all_serve(replicas, ["a", "b"], engines[:1])
    updating, engine = replicas.engine("a", url), replicas.engine("b", url)
    records = replicas.pools["a"]._records
    assert await records.claim(updating, 60.0) is None
    await replicas.pools["a"].reports.set_state(updating, EngineState.UPDATING)
    await replicas.read("b")
    assert (engine.state, engine.paused, replicas.pools["b"].due()) == ("updating", True, [])
    await records.release(updating, whole=True)
    await replicas.round("b")
    assert (engine.state, replicas.row(url).state) == ("serving", "serving")


@pytest.mark.parametrize("change", ["claim", "release"])
async def test_a_claim_of_another_replica_does_not_refresh_an_old_observation(replicas, engines, change):
    (url, *_) = await all_serve(replicas, ["a", "b"], engines[:1])
    other = replicas.pools["b"]
    engine = replicas.engine("b", url)
    await other.updates.ask(engine)
    assert await replicas.pools["a"]._records.claim(replicas.engine("a", url), 60.0) is None
    if change == "claim":
        assert await other._records.claim(engine, 60.0) == "a"
    else:
        await other._records.release(engine, whole=True)
    await other.reports.set_state(engine, EngineState.UPDATING)
    assert (replicas.row(url).state, replicas.row(url).updater) == ("serving", "a")


async def test_an_engine_that_left_while_it_was_probed_does_not_come_back(replicas, engines):
    (url, *_) = await all_serve(replicas, ["a"], engines[:1])
    pool, engine = replicas.pools["a"], replicas.engine("a", url)
    engines[0].version = "7"  # it has to be updated
    replicas.database.transact(fleet.leave, replicas.run_id, url, "test")
    await pool.probe(engine)
    assert replicas.database.query(engine_claims.of_run, replicas.run_id) == []
    assert (engine.state, engine.error) == ("dead", f"{url} has left the run")
    assert engines[0].version == "7"


async def test_a_replica_with_calls_at_an_engine_that_is_said_to_be_dead_looks_itself(replicas, engines):
    """It breaks off calls that hang there, but not those that an engine still samples."""
    (url, *_) = await all_serve(replicas, NAMES, engines[:2])
    caller, holder = not_watching(replicas, url)
    replicas.cuts[caller].add(url)
    replicas.engine(holder, url).running = 1
    await replicas.fails(caller, url)
    await replicas.read(holder)
    assert url in [engine.url for engine in replicas.pools[holder].due()]
    await replicas.round(holder)
    assert replicas.row(url).state == "serving"
    assert url not in [engine.url for engine in replicas.pools[holder].due()]


async def test_calls_of_every_replica_name_the_adapter_that_one_of_them_has_loaded(replicas, engines, tmp_path):
    (url, *_) = await all_serve(replicas, ["a"], engines[:1])
    other = replicas.add("b", adapters=Adapters(replicas.pools["a"]._records.oldest_call))
    folder = tmp_path / "v1-step"
    add_version(replicas.database, replicas.run_id, 1, folder)
    columns = {"state": "serving", "version": 1, "error": None, "replica": "a", "joined": True}
    assert replicas.database.transact(fleet.save, replicas.run_id, url, known=99, **columns)[0]
    await replicas.read("b")
    (engine,) = other.engines
    assert (engine.version, engine.adapter, engine.folder) == (1, Adapter("v1-step", 1), str(tmp_path))
