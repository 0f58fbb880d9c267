"""Which engines serve, which one a session gets, and how one is taken out and let in again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.sglang_client import EngineClient
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.calls.sampling.sample_segment import Interrupted, Sampled
from agentrl.proxy.calls.sampling.sampling import WHOLE_INTERVAL, SampleRequest, sample
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines import updates
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.training.publishes import Wanted
from agentrl.testing import FakeEngine, Reply


class Store(EngineRecords):
    """What the pool asks the store."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self.pending: set[int] = set()
        self.root = str(folder)
        self.replica = "me"
        self.members: dict[str, Member] = {}
        self.was_undone = False
        self.claimed: dict[str, str] = {}
        self.fails = 0

    async def wanted(self, reported: int | None) -> Wanted:
        return Wanted(self.version if reported not in self.pending else reported or 0)

    async def folder(self, version: int, recorded: RecordedFolder | None = None) -> str:
        if self.fails:
            self.fails -= 1
            raise StoreError("away")
        return self.root

    async def save(self, engine: Engine) -> tuple[bool, Member | None]:
        row = self.members.get(engine.url, Member(engine.url))
        if row.changes > engine.seen:
            return False, row
        saw = {"state": engine.state.value, "version": engine.version, "seen_by": self.replica}
        self.members[engine.url] = replace(row, changes=row.changes + 1, **saw)
        return True, self.members[engine.url]

    async def claim(self, engine: Engine, seconds: float) -> str | None:
        self.claimed[engine.url] = self.claimed.get(engine.url) or "me"
        return None if self.claimed[engine.url] == "me" else self.claimed[engine.url]

    async def release(self, engine: Engine, *, whole: bool) -> None:
        assert self.claimed.pop(engine.url) == "me"
        if not whole:
            self.claimed[engine.url] = ""  # free for all

    async def is_whole(self, url: str) -> bool:
        return url not in self.claimed

    async def read_fleet(self) -> News:
        return News(at=0.0, version=self.version, leased=False, gone=0, whole=True, members=[], replicas={})

    def drain(self, *urls: str) -> None:
        for url, row in self.members.items():
            self.members[url] = replace(row, changes=row.changes + 1, draining=url in urls)

    async def undone(self, version: int) -> bool:
        return self.was_undone


@pytest.fixture
def fakes() -> Iterator[list[FakeEngine]]:
    with FakeEngine() as one, FakeEngine() as two:
        yield [one, two]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def make(http: aiohttp.ClientSession, store: Store) -> Callable[..., EnginePool]:
    def build(*urls: str) -> EnginePool:
        return EnginePool([EngineClient(url, http) for url in urls], store)

    return build


@pytest.fixture
async def pool(make: Callable[..., EnginePool], fakes: list[FakeEngine]) -> EnginePool:
    """Both engines serve."""
    pool = make(*(fake.url for fake in fakes))
    for engine in pool.engines:
        await pool.probe(engine)
    assert states(pool) == ["serving", "serving"]
    return pool


@pytest.fixture
async def watched(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnginePool]:
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.02)
    watch = asyncio.create_task(pool.watch())
    yield pool
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


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
    patch.setattr(EngineClient, method, forever)


def states(pool: EnginePool) -> list[str]:
    return [engine.state.value for engine in pool.engines]


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def soon() -> float:
    return time.monotonic() + 10


async def test_a_session_stays_on_its_engine_and_new_ones_go_where_least_runs(pool: EnginePool) -> None:
    home = await pool.acquire("a", soon())
    assert [await pool.acquire("a", soon()) for _ in range(5)] == [home] * 5
    (other,) = (engine for engine in pool.engines if engine is not home)
    assert [await pool.acquire(name, soon()) for name in "bcdefg"] == [other] * 6
    assert sorted(engine.running for engine in pool.engines) == [6, 6]


async def test_idle_engines_share_sessions(pool: EnginePool) -> None:
    used = set()
    for n in range(32):
        engine = await pool.acquire(f"session-{n}", soon())
        used.add(engine.url)
        pool.release(engine)
    assert len(used) == 2


async def test_sessions_spread_over_a_thousand_idle_engines(make: Callable[..., EnginePool]) -> None:
    pool = make(*(f"http://10.0.{n >> 8}.{n & 255}:30000" for n in range(1000)))
    for engine in pool.engines:
        engine.state = EngineState.SERVING
    used: Counter[str] = Counter()
    for n in range(4000):
        engine = await pool.acquire(f"session-{n}", soon())
        used[engine.url] += 1
        pool.release(engine)
    assert len(used) > 950  # 982 are expected when each is as likely as another
    assert max(used.values()) < 20


async def test_while_an_engine_is_updated_its_sessions_use_another_and_come_home(pool: EnginePool) -> None:
    home = await pool.acquire("a", soon())
    (other,) = (engine for engine in pool.engines if engine is not home)
    await pool.reports.set_state(home, EngineState.UPDATING)
    assert await pool.acquire("a", soon()) is other
    assert await pool.acquire("new", soon()) is other
    await pool.reports.set_state(home, EngineState.SERVING)
    assert await pool.acquire("a", soon()) is home


async def test_an_engine_that_is_updated_holds_calls_when_no_other_serves(pool: EnginePool) -> None:
    home = await pool.acquire("a", soon())
    (other,) = (engine for engine in pool.engines if engine is not home)
    await pool.reports.set_state(home, EngineState.UPDATING)
    await pool.reports.set_state(other, EngineState.DEAD)
    with pytest.raises(EngineUnavailable):  # it may still sample with the weights that it is to lose
        await pool.acquire("a", time.monotonic() + 0.01)
    home.paused = True
    assert await pool.acquire("a", soon()) is home
    await pool.reports.set_state(home, EngineState.DEAD)
    with pytest.raises(EngineUnavailable):
        await pool.acquire("a", time.monotonic() + 0.01)


async def test_who_waits_is_woken(pool: EnginePool) -> None:
    for engine in pool.engines:
        await pool.reports.set_state(engine, EngineState.DEAD)
    waiting = [asyncio.create_task(pool.acquire(f"s{n}", soon())) for n in range(4)]
    await asyncio.sleep(0)
    await pool.reports.set_state(pool.engines[1], EngineState.SERVING)
    assert await asyncio.gather(*waiting) == [pool.engines[1]] * 4


async def test_a_drained_engine_gets_nothing_new(pool: EnginePool, store: Store) -> None:
    home = await pool.acquire("a", soon())
    store.drain(home.url)
    await pool.read_fleet()
    assert (await pool.acquire("a", soon())) is not home
    assert home.running == 1
    store.drain(*(engine.url for engine in pool.engines))
    await pool.read_fleet()
    waiting = asyncio.create_task(pool.acquire("b", soon()))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.drain()
    await pool.read_fleet()
    await waiting


async def test_one_that_was_restarted_serves_after_it_loaded_the_current_version(
    watched: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.version = 3
    await eventually(lambda: [fake.version for fake in fakes] == ["3", "3"] and states(watched) == ["serving"] * 2)
    fakes[0].stop()
    await eventually(lambda: states(watched) == ["dead", "serving"])
    store.fails = 2  # the store cannot say where the weights are
    fakes[0].start()
    assert fakes[0].version == 0
    await eventually(lambda: states(watched) == ["serving", "serving"])
    assert watched.engines[0].version == 3
    assert [str(fake.version) for fake in fakes] == ["3", "3"]


async def test_the_run_moves_on_while_an_engine_comes_back(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.version = 3
    seen: list[str] = []
    folder = store.folder

    async def slow(version: int, _: RecordedFolder | None = None) -> str:
        seen.append(f"{version}, {pool.engines[0].state}")
        if len(seen) == 2:  # it is read once more, before the engine waits
            store.version = 4
        return await folder(version)

    monkeypatch.setattr(store, "folder", slow)
    await pool.reports.set_state(pool.engines[0], EngineState.DEAD)
    await pool.probe(pool.engines[0])
    assert seen == ["3, dead", "3, dead", "4, updating", "4, updating"]
    assert fakes[0].version == "4"


async def test_one_engine_that_hangs_delays_nobody(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(updates, "PROBE_TIMEOUT_S", 60.0)
    pool = make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", fakes[0].url)
    watch = asyncio.create_task(pool.watch())
    await eventually(lambda: states(pool) == ["dead", "serving"])
    fakes[0].stop()
    await eventually(lambda: states(pool) == ["dead", "dead"])
    fakes[0].start()
    await eventually(lambda: states(pool) == ["dead", "serving"])
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    server.close()


async def test_an_engine_that_falls_silent_is_dead_after_some_probes_and_its_calls_end(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pool.engines[0]
    hung_up = []

    async def forever() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(updates, "PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(engine.client, "model_info", forever)
    monkeypatch.setattr(engine.client, "hang_up", lambda: hung_up.append(engine.state))
    for _ in range(pools.HANGS_AFTER - 1):
        await pool.probe(engine)
        assert engine.state is EngineState.SERVING
    await pool.probe(engine)
    assert engine.state is EngineState.DEAD
    assert hung_up == [EngineState.SERVING]


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


async def test_what_a_replica_saw_before_an_update_does_not_replace_the_update(
    pool: EnginePool,
    fakes: list[FakeEngine],
    store: Store,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It records late: the engine was paused when it asked, and another replica has continued it since."""
    store.pending = {1}
    client = EngineClient(fakes[0].url, http)
    slow = EnginePool([client], store)
    await slow.probe(slow.engines[0])
    with monkeypatch.context() as patch:

        async def paused() -> bool:
            await pool.load(pool.engines[0], 1)
            return True

        patch.setattr(client, "paused", paused)
        await slow.probe(slow.engines[0])
    row = store.members[fakes[0].url]
    assert (states(slow), row.state, row.version) == (["serving"], "serving", 1)  # it believes the later one
    assert slow.engines[0].version == 1
    fakes[0].stop()
    await slow.probe(slow.engines[0])
    assert store.members[fakes[0].url].state == "dead"


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


async def test_what_was_left_with_the_label_of_an_unfinished_publish_gets_the_runs_version(
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


async def test_what_another_replica_has_just_done_is_not_done_again(
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


async def test_a_claim_that_cannot_be_released_is_when_the_store_answers_again(
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


async def test_an_engine_that_does_not_go_on_was_not_updated(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        hang(patch, "continue_generation")
        with pytest.raises(EngineUnavailable, match="was not updated in"):
            await pool.load(pool.engines[0], 1)
    assert (fakes[0].paused, store.claimed) == (True, {fakes[0].url: ""})


async def test_a_dead_engine_is_not_waited_for_because_a_dead_replica_has_it(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.claimed[fakes[0].url] = "gone"
    fakes[0].stop()
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(pool.load(pool.engines[0], 1), 120)


async def test_an_engine_that_starts_gets_no_calls(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    """It answers as one that is paused, and would sample with base weights."""
    fakes[0].paused = fakes[1].paused = True
    for engine in pool.engines:
        await pool.probe(engine)
    assert states(pool) == ["updating", "updating"]
    with pytest.raises(EngineUnavailable):
        await pool.acquire("a", time.monotonic() + 0.01)


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


async def test_going_back_keeps_no_cache(pool: EnginePool, fakes: list[FakeEngine]) -> None:
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


async def test_what_a_dead_engine_sampled_is_kept(alone: EnginePool, fakes: list[FakeEngine]) -> None:
    fakes[0].enqueue(Reply([5, 6, 7, 8], drop_after=2), [7, 8, 2])
    sampled = await answer(alone)
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 7, 8, 2], [(0, 0, 5)])
    assert fakes[0].requests[1]["sampling_params"]["max_new_tokens"] == 8


async def test_who_died_behind_the_last_token_has_finished(alone: EnginePool, fakes: list[FakeEngine]) -> None:
    fakes[0].enqueue(Reply([5, 2], drop_after=2))
    sampled = await answer(alone)
    assert (sampled.output_ids, sampled.finish_reason, spans(sampled)) == ([5, 2], "stop", [(0, 0, 2)])
    assert len(fakes[0].requests) == 1


async def test_versions_are_not_guessed_where_weights_changed_before_the_death(
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


async def test_nor_where_the_engine_may_have_been_away_and_come_back(
    alone: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    store.was_undone = True
    fakes[0].enqueue(Reply([5, 6, 7, 8], drop_after=2))
    with pytest.raises(Interrupted, match="which weights"):
        await answer(alone)


@pytest.mark.parametrize("label", [0, "default"])
async def test_an_engine_that_is_back_before_anybody_looked_samples_nothing(
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
