"""The engine pool: which engines serve, which one a session uses, and how an engine enters or re-enters the pool.

An engine serves only while it answers and reports the run's current version, or the version that a replica is
publishing. An engine that restarted with the base weights, or missed a publish, is updated first. A paused engine is
alive: it holds its calls, and gets new ones only when no other engine serves. `engine_state` draws the states.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.engine.sglang_client import EngineClient, PauseMode
from agentrl.errors import EngineDied, EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.retry_budget import RetryBudget
from agentrl.proxy.engines.updates import POLL_S, Updates
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery, EngineBusy, Loaded, Records
from agentrl.proxy.recent import Recent

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
HANGS_AFTER = 3
"""Probes in a row without an answer, until an engine that still takes connections counts as dead."""


class EnginePool:
    """Chooses the session's engine, or the least loaded one, and keeps the states of the engines current.

    With `adapters`, versions are adapters over base weights.
    """

    def __init__(
        self,
        clients: list[EngineClient],
        records: Records,
        *,
        adapters: Adapters | None = None,
        pause_mode: PauseMode = "retract",
        update_timeout_s: float = 180.0,
    ) -> None:
        self.engines = [Engine(client) for client in clients]
        self.update_lock = asyncio.Lock()  # one publisher at a time
        self.budget = RetryBudget()
        self.calls = 0  # calls that are being sampled
        self._records = records
        self._adapters = adapters
        self.updates = Updates(
            records, self.set_state, self._notify, adapters=adapters, pause_mode=pause_mode, timeout_s=update_timeout_s
        )
        self._sticky: Recent[Engine] = Recent()
        self._deaths: Recent[int] = Recent()  # call id → how many engines died while they sampled it
        self._news = asyncio.Event()
        self._segments = 0

    # -- the watch -------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe every engine forever, each at its own pace: the pool's only background work."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_drains())
            for engine in self.engines:
                group.create_task(self._follow(engine))

    async def _follow(self, engine: Engine) -> None:
        while True:
            engine.probe_due.clear()
            if not engine.lock.locked():
                try:
                    await self.probe(engine)
                except StoreError as error:
                    log.error("engine %s: %s; probing again", engine.url, error)
            try:
                async with asyncio.timeout(POLL_S if engine.state is EngineState.UPDATING else WATCH_EVERY_S):
                    await engine.probe_due.wait()
            except TimeoutError:
                continue

    async def _follow_drains(self) -> None:
        while True:
            try:
                await self.read_drains()
            except StoreError as error:
                log.error("which engines are drained could not be read: %s", error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def read_drains(self) -> None:
        """Read which engines are drained. Raises StoreError."""
        drained = await self._records.drained()
        for engine in self.engines:
            engine.draining = engine.url in drained
        self._notify()

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
                await self.set_state(engine, EngineState.UPDATING)
            except EngineError as error:
                if isinstance(error, EngineUnavailable):
                    engine.client.hang_up()
                await self.set_state(engine, EngineState.DEAD, error=str(error))

    async def _no_answer(self, engine: Engine) -> None:
        """A busy engine may answer late. One that misses HANGS_AFTER probes hangs: its calls are ended."""
        engine.unanswered += 1
        if engine.unanswered >= HANGS_AFTER or engine.state is EngineState.DEAD:
            engine.client.hang_up()
            await self.set_state(engine, EngineState.DEAD, error="no answer in time")

    async def load(self, engine: Engine, version: int, delivery: Delivery = BY_FOLDER) -> Loaded:
        """Load `version` on an engine that answers, unless it has it, and let it serve: `Updates.load`."""
        async with engine.lock:
            return await self.updates.load(engine, version, delivery)

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
        if not usable or home in usable:
            return home if usable else None
        order = hashlib.blake2b(session_id.encode()).digest()[0]
        chosen = min(enumerate(usable), key=lambda at: (at[1].running, (at[0] + order) % len(usable)))[1]
        if home is None or home.draining or home.state is EngineState.DEAD:  # after an update the session returns to it
            self._sticky[session_id] = chosen
        return chosen

    def release(self, engine: Engine) -> None:
        """The call that acquired the engine has ended."""
        engine.running -= 1

    def forget(self, session_id: str) -> None:
        """Drop the engine of a session that has ended."""
        self._sticky.pop(session_id, None)

    # -- calls and their failures ----------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a call is sampled."""
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
        """An engine broke off a call or did not accept it: it is dead until it answers a probe, which is due now.

        Returns how many engines have died while they sampled this call.
        """
        await self.set_state(engine, EngineState.DEAD, error=str(error))
        engine.probe_due.set()
        deaths = self._deaths.get(rid, 0) + isinstance(error, EngineDied)
        self._deaths[rid] = deaths
        return deaths

    async def serves_rightly(self, version: int) -> bool:
        """Whether an engine should be serving `version`. Raises StoreError."""
        return await self._records.wanted(version) == version

    async def never_left(self, version: int) -> bool:
        """Whether an engine that served `version` before and serves it now did so without a break. Raises StoreError.

        It could only have returned from a newer version that was rolled back.
        """
        return not await self._records.undone(version)

    async def set_state(self, engine: Engine, state: EngineState, error: str | None = None) -> None:
        """Set the state of an engine, wake the calls that wait for one, and record the state in the store."""
        before, engine.state, engine.error = engine.state, state, error
        engine.paused = engine.paused and state is EngineState.UPDATING
        engine.paused_since = None if state is EngineState.DEAD else engine.paused_since
        if before is not state:
            log.info("engine %s is %s%s", engine.url, state, f": {error}" if error else "")
            engine.reported = False
        self._notify()
        if not engine.reported:
            try:
                await self._records.save(engine)
                engine.reported = True
            except StoreError as problem:  # the next probe tries again
                log.error("engine %s is %s, which could not be recorded: %s", engine.url, state, problem)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
