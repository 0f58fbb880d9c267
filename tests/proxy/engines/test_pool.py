"""Which engines serve, which one a session gets, and when an engine is dead or serves again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineUnavailable
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines import updates
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.testing import FakeEngine

from .pool_setup import Store, eventually, soon, states


async def test_a_session_stays_on_its_engine_and_a_new_one_gets_the_least_loaded(pool: EnginePool) -> None:
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


@pytest.mark.long
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


async def test_waiting_calls_continue_when_an_engine_serves(pool: EnginePool) -> None:
    for engine in pool.engines:
        await pool.reports.set_state(engine, EngineState.DEAD)
    waiting = [asyncio.create_task(pool.acquire(f"s{n}", soon())) for n in range(4)]
    await asyncio.sleep(0)
    await pool.reports.set_state(pool.engines[1], EngineState.SERVING)
    assert await asyncio.gather(*waiting) == [pool.engines[1]] * 4


async def test_a_drained_engine_gets_no_new_calls(pool: EnginePool, store: Store) -> None:
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


async def test_a_restarted_engine_serves_after_it_loaded_the_current_version(
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


async def test_a_returning_engine_loads_the_version_that_was_published_meanwhile(
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


async def test_a_hanging_engine_does_not_delay_the_others(
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


async def test_a_silent_engine_is_dead_after_some_probes_and_its_calls_end(
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


async def test_an_observation_from_before_an_update_does_not_replace_the_update(
    pool: EnginePool,
    fakes: list[FakeEngine],
    store: Store,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It records late: the engine was paused when it asked, and another replica has continued it since."""
    store.pending = {1}
    client = SGLangClient(fakes[0].url, http)
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


async def test_an_engine_that_starts_gets_no_calls(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    """It answers as one that is paused, and would sample with base weights."""
    fakes[0].paused = fakes[1].paused = True
    for engine in pool.engines:
        await pool.probe(engine)
    assert states(pool) == ["updating", "updating"]
    with pytest.raises(EngineUnavailable):
        await pool.acquire("a", time.monotonic() + 0.01)


@pytest.mark.parametrize("label", [None, 3, "9" * 5000, "9" * 50])
async def test_an_engine_with_an_odd_label_does_not_end_the_watch_of_the_others(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, label: object
) -> None:
    async def odd(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "x", "weight_version": label})

    app = web.Application()
    app.router.add_get("/model_info", odd)
    app.router.add_get("/ready", odd)
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.02)
    async with TestServer(app) as server:
        pool = make(str(server.make_url("")).rstrip("/"), fakes[0].url)
        watch = asyncio.create_task(pool.watch())
        await eventually(lambda: watch.done() or states(pool) == ["dead", "serving"])
        fakes[0].stop()
        await eventually(lambda: watch.done() or states(pool) == ["dead", "dead"])
        assert not watch.done()
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
