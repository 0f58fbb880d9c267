"""The engine pool: which engines serve, which one a session uses, and how an engine enters, re-enters or leaves.

The engines of the proxy's start stay in the pool; others join and leave by the store (`agentrl.store.fleet`).

An engine serves only while it answers and reports the run's current version, or the version that a replica is
publishing. An engine that restarted with the base weights, or missed a publish, is updated first. A paused engine is
alive: it holds its calls, and gets new ones only when no other engine serves. While the trainer has the engines' GPU
memory, no engine gets calls: they wait here. `engine_state` draws the states.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.domain.schemas import Json
from agentrl.engine.engine_client import EngineClient, PauseMode
from agentrl.errors import EngineDied, EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.delivery.catching_up import CatchingUp
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.delivery.wave_run import Pace
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_reports import EngineReports
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.retry_budget import RetryBudget
from agentrl.proxy.engines.updates import POLL_S, Updates
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery, EngineBusy, Loaded, Prepared
from agentrl.proxy.engines.watchers import LiveReplicas, list_digest, watched_by
from agentrl.proxy.recent import Recent
from agentrl.store import fleet
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
SILENT_S = 10.0
"""A replica whose heartbeat has not changed for this time watches no engines any more: another one takes them over."""
HANGS_AFTER = 3
"""Number of unanswered probes in a row after which an engine that still takes connections counts as dead."""


class EnginePool:
    """Chooses the session's engine, or the least loaded one, and keeps the states of the engines current.

    With `adapters`, versions are adapters over base weights.
    """

    def __init__(
        self,
        clients: list[EngineClient],
        records: EngineRecords,
        *,
        connect: Callable[[Member], EngineClient] | None = None,
        adapters: Adapters | None = None,
        watchers: int = 2,
        silent_s: float = SILENT_S,
        pause_mode: PauseMode = "retract",
        update_timeout_s: float = 180.0,
        pace: Pace = Pace(),
        preparations: Preparations | None = None,
    ) -> None:
        self.engines = [Engine(client) for client in clients]
        self._connect = connect  # makes the client of an engine that joins
        self.update_lock = asyncio.Lock()  # one publisher at a time
        self.pace = pace  # of a publish
        self.preparations = preparations  # None: engines load versions while they are paused
        self.budget = RetryBudget()
        self.calls = 0  # calls that are being sampled
        self._records = records
        self._adapters = adapters
        self.reports = EngineReports(records, self._notify, by_adapter=adapters is not None)
        self.updates = Updates(
            records,
            self.reports.set_state,
            self._notify,
            adapters=adapters,
            pause_mode=pause_mode,
            timeout_s=update_timeout_s,
            preparations=preparations,
            peers=self._peers,
        )
        self._called = asyncio.Event()  # the last call of an engine has ended
        self.publishing: int | None = None  # the version that this replica publishes
        self.catching_up = CatchingUp(
            run_version=lambda: records.run_version,
            target=records.target,
            preparations=preparations,
            pace=pace,
            catch_up=self.catch_up,
            lost=self.reports.lost,
            peers=self._peers,
            called=self._called,
        )
        self._sticky: Recent[Engine] = Recent()
        self._deaths: Recent[int] = Recent()  # call id → how many engines died while they sampled it
        self._news = asyncio.Event()
        self._digest = list_digest(engine.url for engine in self.engines)
        self._watchers = watchers
        self._live = LiveReplicas(records.replica, min(silent_s, SILENT_S))
        self.live_replicas: frozenset[str] = frozenset()  # of the last read of the fleet
        self._divided: tuple[object, ...] = ()
        self._group: asyncio.TaskGroup | None = None
        self._reading = asyncio.Lock()
        self._read_at = self._read_when = self._drop_at = 0.0  # the last by the database's clock, like the first
        self._segments = 0

    # -- the watch -------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Read the fleet, and probe the engines that this replica attends to: the pool's only background work."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._records.lag:
                group.create_task(self.catching_up.run(lambda: self.engines))
            while True:
                try:
                    await self.read_fleet()
                except StoreError as error:
                    log.error("the engines of the run could not be read: %s", error)
                for engine in self.engines:
                    self._attend(engine)
                await asyncio.sleep(WATCH_EVERY_S)

    def _attend(self, engine: Engine) -> None:
        """Begin to probe an engine, if this replica should."""
        if self._group is not None and not engine.followed and self.attends(engine):
            engine.followed = True
            self._group.create_task(self._follow(engine))

    def attends(self, engine: Engine) -> bool:
        """Whether this replica probes an engine: as its watcher; to reach it again; to free calls that it holds."""
        if engine.left:
            return False
        down = engine.row is not None and engine.row.state == "dead"
        return engine.mine or (engine.unreached and not down) or (engine.running > 0 and down)

    def due(self) -> list[Engine]:
        """The engines that this replica would probe now."""
        return [engine for engine in self.engines if self.attends(engine) and not self._is_claimed(engine)]

    async def _follow(self, engine: Engine) -> None:
        """Probe an engine, at its own pace, as long as this replica attends to it."""
        while self.attends(engine):
            engine.probe_due.clear()
            if not engine.lock.locked() and not self._is_claimed(engine):
                try:
                    await self.probe(engine)
                except StoreError as error:
                    log.error("engine %s: %s; probing again", engine.url, error)
            try:
                async with asyncio.timeout(POLL_S if engine.state is EngineState.UPDATING else WATCH_EVERY_S):
                    await engine.probe_due.wait()
            except TimeoutError:
                continue
        engine.followed = False

    def _is_claimed(self, engine: Engine) -> bool:
        """Whether another replica updates the engine: its row says so, and will say how that ends."""
        row = engine.row
        if row is None or row.state != "updating" or row.updater in (None, self._records.replica):
            return False
        return (row.updating_until or 0.0) > self._read_at + time.monotonic() - self._read_when

    async def read_fleet(self) -> None:
        """Read what changed: the engines that there are, their states, and the live replicas. Raises StoreError."""
        async with self._reading:
            news = await self._records.read_fleet()
            self._read_at, self._read_when = news.at, time.monotonic()
            rows = self._records.members
            for engine in self.engines:
                row = rows.get(engine.url)
                if engine.joined and (row is None or not row.joined or not engine.is_of(row)):
                    self._leave(engine)
            known = {engine.url for engine in self.engines if not engine.left}
            joined = [row for row in rows.values() if row.joined and row.url not in known]
            new = [self._joining(row) for row in joined] if self._connect is not None else []
            self.engines = [engine for engine in self.engines if not engine.left] + new  # others iterate the old list
            if new:  # perhaps at a known address
                self._divided = ()
            self._divide(news)
            for engine in self.engines:
                if (row := rows.get(engine.url)) is not None and row.changes > engine.changes:
                    await self.reports.take_over(engine, row)
            self._notify()
            await self._drop_lost(news)

    def _divide(self, news: News) -> None:
        """Find the engines that this replica watches. Replicas with the same `--engine` list divide it."""
        me, now = self._records.replica, time.monotonic()
        beats = {name: seen_at for name, (seen_at, about) in news.replicas.items() if not about.get("ended")}
        live = self.live_replicas = self._live.read(beats, now)
        alike = {name for name in live if name == me or news.replicas[name][1].get("engines") == self._digest}
        self.reports.fleet_was_read(live - {me}, len(self.engines))
        urls = tuple(engine.url for engine in self.engines)
        if (urls, live, alike) == self._divided:
            return
        self._divided = (urls, live, alike)
        joined = [engine.url for engine in self.engines if engine.joined]
        listed = [engine.url for engine in self.engines if not engine.joined]
        mine = watched_by(me, joined, live, self._watchers) | watched_by(me, listed, alike, self._watchers)
        for engine in self.engines:
            if engine.mine and engine.url not in mine:
                engine.row = None  # what its new watchers say counts now, also where we could not tell what we saw
            engine.mine = engine.url in mine

    async def _drop_lost(self, news: News) -> None:
        """Let the watcher of a dead engine whose lease is over take it out of the run. Raises StoreError."""
        rows = (engine.row for engine in self.engines if engine.mine and engine.joined)
        lost = any(row and row.state == "dead" and (row.leased_until or 0.0) < news.at for row in rows)
        if lost and news.at > self._drop_at:
            self._drop_at = news.at + fleet.CHECKED_S
            await self._records.drop_lost()

    def about(self) -> Json:
        """The data of this replica's heartbeat: digest of its engine list, engines that it watches, running calls."""
        return {
            "engines": self._digest,
            "watches": sum(engine.mine for engine in self.engines),
            "calls": self.calls,
        }

    def _joining(self, row: Member) -> Engine:
        assert self._connect is not None
        log.info("engine %s has joined", row.url)
        return Engine(self._connect(row), joined=True, own_key=row.own_key)

    def _leave(self, engine: Engine) -> None:
        """Give an engine no more calls; those that it has continue, unless it breaks them off."""
        log.info("engine %s has left", engine.url)
        engine.left = engine.draining = True
        engine.probe_due.set()

    async def probe(self, engine: Engine) -> None:
        """Ask an engine for its version, and update it if it should serve another one. Raises StoreError."""
        async with engine.lock:
            try:
                await self.updates.bring(engine)
                if self._adapters is not None:
                    await self._adapters.retire(engine)
            except TimeoutError:
                await self._no_answer(engine)
            except EngineBusy:
                await self.reports.set_state(engine, EngineState.UPDATING)
            except EngineError as error:
                if isinstance(error, EngineUnavailable):
                    engine.client.hang_up()
                await self.reports.lost(engine, error)

    async def _no_answer(self, engine: Engine) -> None:
        """A busy engine may answer late. One that misses HANGS_AFTER probes hangs: its calls are ended."""
        engine.unanswered += 1
        if engine.unanswered >= HANGS_AFTER or engine.state is EngineState.DEAD:
            engine.client.hang_up()
            await self.reports.lost(engine, "no answer in time")

    @property
    def trainer_epoch(self) -> int:
        """The newest trainer's epoch, as of the last read of the fleet: at most about a second old."""
        return self._records.trainer_epoch

    @property
    def version(self) -> int | None:
        """The run's version, as of the last read of the fleet."""
        return self._records.run_version

    async def load(
        self, engine: Engine, version: int, delivery: Delivery = BY_FOLDER, prepared: Prepared | None = None
    ) -> Loaded:
        """Load `version` on an engine that answers and lacks it, then let the engine serve: `Updates.load`."""
        async with engine.lock:
            return await self.updates.load(engine, version, delivery, prepared)

    async def catch_up(self, engine: Engine, version: int, delivery: Delivery, prepared: Prepared | None) -> Loaded:
        """`load`, unless the engine has a newer version meanwhile: then it raises EngineBusy."""
        async with engine.lock:
            return await self.updates.load(engine, version, delivery, prepared, forward_only=True)

    async def kept(self, version: int) -> set[int]:
        """The versions that engines may keep when the run moves to `version`. Raises StoreError."""
        return await self._records.kept(version)

    async def keeps(self, engine: Engine, kept: set[int]) -> bool:
        """Whether an engine serves one of the `kept` versions, which it may keep. Raises EngineError."""
        async with engine.lock:
            return await self.updates.serves_one_of(engine, kept)

    def _peers(self, engine: Engine) -> list[Engine]:
        """The engines that have probably prepared the run's version, those with the fewest calls first."""
        others = (other for other in self.engines if other is not engine and other.prepares)
        serving = (other for other in others if other.state is EngineState.SERVING)
        return sorted(serving, key=lambda other: (other.running, other.url))

    # -- the choice ------------------------------------------------------------------------------------------------

    async def acquire(self, session_id: str, deadline: float) -> Engine:
        """The session's engine, or the least loaded one that serves; waits for one until `deadline` (monotonic).

        Raises EngineUnavailable when none serves in time. Call `release` when the call has ended.
        """
        while (engine := self._choose(session_id)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailable("no inference engine is serving")
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        engine.running += 1
        return engine

    def _choose(self, session_id: str) -> Engine | None:
        home = self._sticky.get(session_id)
        if home is not None and home.state is EngineState.SERVING and not home.draining:
            return home
        usable = [e for e in self.engines if e.state is EngineState.SERVING and not e.draining]
        if not usable:  # an engine that is being updated holds the call, and samples it afterwards
            usable = [e for e in self.engines if e.state is EngineState.UPDATING and e.paused and not e.draining]
        if not usable or any(engine is home for engine in usable):
            return home if usable else None
        least = min(self._load_of(engine) for engine in usable)
        idlest = [engine for engine in usable if self._load_of(engine) == least]
        order = int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=8).digest())
        chosen = idlest[order % len(idlest)]
        if home is None or home.draining or home.state is EngineState.DEAD:  # after an update the session returns to it
            self._sticky[session_id] = chosen
        return chosen

    def _load_of(self, engine: Engine) -> int:
        """The load by which an engine is chosen: calls on one that is about to change its weights count twice."""
        newest = self._records.run_version if self.publishing is None else self.publishing
        behind = newest is not None and engine.version is not None and engine.version < newest
        return 2 * engine.running + 1 if behind else engine.running

    def release(self, engine: Engine) -> None:
        """The call that acquired the engine has ended."""
        engine.running -= 1
        if not engine.running:
            self._called.set()

    def forget(self, session_id: str) -> None:
        """Drop the engine of a session that has ended."""
        self._sticky.pop(session_id, None)

    # -- calls and their failures ----------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call while it is sampled."""
        self.budget.call(time.monotonic())
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def segment_id(self, rid: str) -> str:
        """A unique name for one request to an engine. All have one length, because engines match names by prefix."""
        self._segments = (self._segments + 1) & 0xFFFFFFFF
        return f"{rid}-{self._segments:08x}"

    async def failed(self, engine: Engine, rid: str, error: EngineError) -> int:
        """Mark an engine dead that broke off a call or did not accept it, and probe it now.

        Returns how many engines have died while they sampled this call.
        """
        engine.seen = engine.changes
        await self.reports.lost(engine, error)
        engine.probe_due.set()
        self._attend(engine)
        deaths = self._deaths.get(rid, 0) + isinstance(error, EngineDied)
        self._deaths[rid] = deaths
        return deaths

    async def serves_rightly(self, version: int) -> bool:
        """Whether an engine should be serving `version`. Raises StoreError."""
        return (await self._records.wanted(version)).version == version

    async def never_left(self, version: int) -> bool:
        """Whether an engine that served `version` before and serves it now did so without a break. Raises StoreError.

        A break is possible only if a newer version was published in between and rolled back.
        """
        return not await self._records.undone(version)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
