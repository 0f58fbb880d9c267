"""Replicas' real pools in one process, over a real database and engines that are objects; a clock that is counted.

A simulated second of a replica is its heartbeat, its read of the fleet, and a probe of each engine that it attends to.
Each replica has a phase within the second, so events are seen by the replicas one after the other, as in reality.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import event

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_client import EngineClient, EngineInfo, PauseMode
from agentrl.errors import EngineUnavailable
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.run_store import RunStore
from agentrl.store import Connection, Database, fleet, heartbeats
from agentrl.store.engine_rows import Member
from agentrl.store.sessions.session_limits import Limits
from agentrl.versions.weights_folder import TENSORS


@dataclass
class SimulatedEngine:
    """An engine without a socket."""

    url: str
    version: int = 0
    dead: bool = False


@dataclass
class Counts:
    """Since the last `take`: requests to engines, statements, and rows of engines that were read."""

    requests: int = 0
    statements: int = 0
    rows: int = 0

    def take(self) -> dict[str, int]:
        """The counts so far; starts again from zero."""
        found = {"requests": self.requests, "statements": self.statements, "rows": self.rows}
        self.requests = self.statements = self.rows = 0
        return found


class Loads:
    """Weight loads of a publish, in rounds. A round ends when `width` engines load, or all that are left."""

    def __init__(self, n_engines: int, width: int) -> None:
        self.rounds = 0
        self._left, self._width, self._loading = n_engines, width, 0
        self._over = asyncio.Event()

    async def load(self) -> None:
        """One engine's load: returns at the end of its round."""
        over = self._over
        self._loading += 1
        if self._loading == min(self._width, self._left):
            self.rounds += 1
            self._left -= self._loading
            self._loading, self._over = 0, asyncio.Event()
            over.set()
        await over.wait()


class SimulatedClient(EngineClient):
    """A client of a simulated engine."""

    backend = "sglang"

    def __init__(self, engine: SimulatedEngine, simulation: Simulation) -> None:
        self.url = engine.url
        self._engine = engine
        self._simulation = simulation

    async def model_info(self) -> EngineInfo:
        self._reach()
        return EngineInfo(model_path="simulated", version=str(self._engine.version))

    async def paused(self, timeout_s: float = 10.0) -> bool:
        self._reach()
        return False

    async def pause(self, mode: PauseMode = "retract") -> None:
        self._reach()

    async def continue_generation(self) -> None:
        self._reach()

    async def update_weights_from_disk(
        self, path: Path | str, version: int, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        self._reach()
        if self._simulation.loads is not None:
            await self._simulation.loads.load()
        self._engine.version = version

    async def label_weights(self, version: int) -> None:
        self._reach()
        self._engine.version = version

    def hang_up(self) -> None:
        """There are no streams."""

    def _reach(self) -> None:
        self._simulation.counts.requests += 1
        if self._engine.dead:
            raise EngineUnavailable(f"{self.url} is dead")


class CountedRecords(EngineRecords):
    """Counts the rows of engines that it reads."""

    counts: Counts

    async def read_fleet(self) -> fleet.News:
        news = await super().read_fleet()
        self.counts.rows += len(news.members)
        return news


@dataclass
class Simulation:
    """A run with `n_replicas` replicas: the first `n_pools` run in this process, the others only send heartbeats."""

    database: Database
    run_id: str
    model: Path
    n_replicas: int
    n_pools: int
    counts: Counts = field(default_factory=Counts)
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    pools: dict[str, EnginePool] = field(default_factory=dict)
    stores: dict[str, RunStore] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    loads: Loads | None = None  # of a publish

    def __post_init__(self) -> None:
        event.listen(self.database.engine, "before_cursor_execute", self._statement)
        draw, limits = random.Random(0), Limits.of(_config())
        self.names = [f"proxy-{n}" for n in range(self.n_replicas)]
        for name in self.names[: self.n_pools]:
            store = self.stores[name] = RunStore(
                database=self.database,
                run_id=self.run_id,
                run_name="bench",
                run_created_at=0.0,
                replica=name,
                limits=limits,
            )
            records = CountedRecords(store, str(self.model), WeightFolders(TENSORS))
            records.counts = self.counts
            self.pools[name] = EnginePool([], records, connect=self._connect)
            self.phases[name] = draw.random()

    def _statement(self, *_: Any) -> None:
        self.counts.statements += 1

    def _connect(self, member: Member) -> SimulatedClient:
        return SimulatedClient(self.engines[member.url], self)

    async def join(self, n_engines: int) -> None:
        """Let engines join that serve already, and run until all replicas have read them."""
        urls = [f"http://10.{n >> 16}.{n >> 8 & 255}.{n & 255}:30000" for n in range(n_engines)]
        self.engines |= {url: SimulatedEngine(url) for url in urls}
        self.database.transact(_join_all, self.run_id, urls)
        await self.second()
        assert all(self.sees(name, url, EngineState.SERVING) for name in self.pools for url in (urls[0], urls[-1]))

    def sees(self, name: str, url: str, state: EngineState) -> bool:
        """Whether a replica has an engine in this state."""
        return any(engine.url == url and engine.state is state for engine in self.pools[name].engines)

    async def second(self, until: Callable[[], bool] = lambda: False, now: float = 0.0) -> float | None:
        """One second of all replicas; returns the simulated time at which `until` became true."""
        self.database.transact(_beat_all, self.run_id, self.names)
        for name in sorted(self.pools, key=lambda name: self.phases[name]):
            await self.pools[name].read_fleet()
            for engine in self.pools[name].due():
                await self.pools[name].probe(engine)
            if until():
                return now + self.phases[name]
        return None

    async def time_until(self, condition: Callable[[], bool]) -> float:
        """Simulated seconds until the condition holds."""
        for now in range(60):
            reached = await self.second(condition, float(now))
            if reached is not None:
                return reached
        raise SystemExit("the simulated fleet did not get there in a minute")


def _config() -> RunConfig:
    return RunConfig.model_validate({"name": "bench", "model": "tiny", "agent": "a:B", "tasks": "t"})


def _join_all(conn: Connection, run_id: str, urls: list[str]) -> None:
    for url in urls:
        fleet.join(conn, run_id, url, 3600.0, "bench")
        seen = {"state": "serving", "version": 0, "error": None}
        fleet.save(conn, run_id, url, known=1, joined=True, replica="bench", **seen)


def _beat_all(conn: Connection, run_id: str, names: list[str]) -> None:
    for name in names:
        heartbeats.beat(conn, run_id, "proxy", name, {})
