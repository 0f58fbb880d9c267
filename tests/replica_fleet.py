"""Several replicas' pools over one real database and fake engines, driven round by round: nothing depends on time.

A round is one second of a replica: it reads the fleet, and probes the engines that it attends to.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy import event

from agentrl.configs.publish_config import PublishConfig
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineUnavailable
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.run_store import RunStore
from agentrl.store import Database, engine_rows, fleet, heartbeats
from agentrl.store.engine_rows import Member
from agentrl.store.sessions.session_limits import Limits
from agentrl.versions.weights_folder import TENSORS


@dataclass
class Counts:
    """Requests to engines and statements of the database since the last `take`."""

    requests: int = 0
    statements: int = 0
    rows: int = 0  # of engines, that reads returned

    def take(self) -> tuple[int, int]:
        """Requests and statements so far; starts again from zero."""
        found, self.requests, self.statements = (self.requests, self.statements), 0, 0
        return found


class CountedClient(SGLangClient):
    """Counts its requests. Engines in `cut` are not reached."""

    counts: Counts
    cut: set[str]

    async def model_info(self) -> Any:
        self._reach()
        return await super().model_info()

    async def paused(self, timeout_s: float = 10.0) -> bool:
        self._reach()
        return await super().paused(timeout_s)

    def _reach(self) -> None:
        self.counts.requests += 1
        if self.url in self.cut:
            raise EngineUnavailable(f"{self.url} is cut off")


@dataclass
class ReplicaFleet:
    """Replicas of one run."""

    database: Database
    run_id: str
    http: aiohttp.ClientSession
    model: Path
    limits: Limits
    counts: Counts = field(default_factory=Counts)
    pools: dict[str, EnginePool] = field(default_factory=dict)
    stores: dict[str, RunStore] = field(default_factory=dict)
    places: VersionPlaces | None = None  # with them, engines prepare versions
    cuts: dict[str, set[str]] = field(default_factory=dict)  # replica → engines that it does not reach

    def __post_init__(self) -> None:
        event.listen(self.database.engine, "before_cursor_execute", self._count)

    def _count(self, *_: Any) -> None:
        self.counts.statements += 1

    def add(self, name: str, urls: list[str] | None = None, **options: Any) -> EnginePool:
        """Start a replica."""
        cut = self.cuts.setdefault(name, set())
        store = self.stores[name] = RunStore(
            database=self.database,
            run_id=self.run_id,
            run_name="r",
            run_created_at=0.0,
            replica=name,
            limits=self.limits,
        )

        def connect(url: str) -> EngineClient:
            client = CountedClient(url, self.http)
            client.counts, client.cut = self.counts, cut
            return client

        def joining(member: Member) -> EngineClient:
            return connect(member.url)

        records = EngineRecords(store, str(self.model), WeightFolders(TENSORS, self.places))
        if self.places is not None:
            options = {"preparations": Preparations.of(PublishConfig(), self.places)} | options
        clients = [connect(url) for url in urls or []]
        self.pools[name] = EnginePool(clients, records, connect=joining, **options)
        return self.pools[name]

    async def join(self, *urls: str) -> None:
        """Let engines join the run."""
        for url in urls:
            self.database.transact(fleet.join, self.run_id, url, 600.0, "test")

    async def round(self, *names: str) -> None:
        """One second of these replicas, or of all."""
        for name in names or tuple(self.pools):
            await self.beat(name)
            await self.read(name)
            for engine in self.pools[name].due():
                await self.pools[name].probe(engine)

    async def beat(self, name: str) -> None:
        """The replica's heartbeat."""
        self.database.transact(heartbeats.beat, self.run_id, "proxy", name, self.pools[name].about())

    async def read(self, name: str) -> None:
        """The replica's read of the fleet."""
        await self.pools[name].read_fleet()

    def states(self, url: str) -> list[str]:
        """The state of an engine at each replica."""
        return [self.engine(name, url).state.value for name in self.pools]

    def row(self, url: str) -> Member:
        """An engine's row in the store."""
        found = self.database.query(engine_rows.member, self.run_id, url)
        assert found is not None
        return found

    def engine(self, name: str, url: str) -> Engine:
        """An engine as a replica knows it."""
        return next(engine for engine in self.pools[name].engines if engine.url == url)

    def watchers(self, url: str) -> list[str]:
        """The replicas that watch an engine."""
        return [name for name in self.pools if self.engine(name, url).mine]

    async def fails(self, name: str, url: str, times: int = 1) -> None:
        """Calls of a replica to an engine break off."""
        for n in range(times):
            with suppress(EngineUnavailable):
                await self.pools[name].failed(self.engine(name, url), f"call-{n}", EngineUnavailable("broken off"))
