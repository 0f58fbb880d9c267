"""Pools of engines without a proxy: one pool over a store in memory, or replicas of a run over a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import aiohttp
import pytest
from databases import Databases
from replica_fleet import ReplicaFleet
from run_records import create_run

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_connections import EngineConnections
from agentrl.engine.engine_keys import EngineKeys
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines.pool import EnginePool
from agentrl.store import Database
from agentrl.store.sessions.session_limits import Limits
from agentrl.testing import FakeEngine

from .pool_setup import Store, states


@pytest.fixture
async def replicas(databases: Databases, database_kind: str, tiny_model: Path) -> AsyncIterator[ReplicaFleet]:
    with databases.lent(database_kind) as url:
        database = Database(url)
        with database.write() as conn:
            run_id = create_run(conn, task_data=[{}], steps=10, base_model=tiny_model)
        limits = Limits.of(RunConfig.model_validate({"name": "r", "model": "tiny", "agent": "a:B", "tasks": "t"}))
        async with aiohttp.ClientSession() as http:
            yield ReplicaFleet(database, run_id, http, tiny_model, limits)
        database.close()


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
async def make(http: aiohttp.ClientSession, store: Store) -> AsyncIterator[Callable[..., EnginePool]]:
    with ExitStack() as stack:

        def build(*urls: str) -> EnginePool:
            connections = EngineConnections(http, EngineKeys(), "sglang")
            clients = [stack.enter_context(closing(connections.listed(url))) for url in urls]
            return EnginePool(clients, store)

        yield build


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
