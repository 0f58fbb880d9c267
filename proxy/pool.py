"""The engines behind the proxy: which of them serve, which one a session uses, and how one comes (back) in.

An engine serves only while it answers and reports the run's current version, or the one that a replica is publishing.
One that restarted (base weights) or missed a publish is brought to the current version first. Paused is not dead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.recent import Recent

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
PROBE_TIMEOUT_S = 10.0


class EngineState(StrEnum):
    """What the pool believes of an engine; the same words as in the store."""

    SERVING = "serving"
    UPDATING = "updating"
    DEAD = "dead"


@dataclass(slots=True)
class Engine:
    """One engine of the pool."""

    client: EngineClient
    state: EngineState = EngineState.DEAD
    version: int | None = None
    running: int = 0  # calls of ours
    tainted: bool = False  # an update did not finish: its label says nothing about its weights
    error: str | None = None
    last_seen_at: float = 0.0
    reported: bool = False  # the store knows of its state

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url


class EnginePool:
    """Sticky, least-loaded choice among serving engines, and the watch that keeps the list true.

    `wanted` tells which version an engine that reports one should serve: the store knows, because any replica may
    publish. `weights` names the folder of a version, `changed` records a changed state. All may raise StoreError, which
    stops neither the watch nor an update.
    """

    def __init__(
        self,
        clients: list[EngineClient],
        *,
        wanted: Callable[[int | None], Awaitable[int]],
        weights: Callable[[int], Awaitable[str]],
        changed: Callable[[Engine], Awaitable[None]],
    ) -> None:
        self.engines = [Engine(client) for client in clients]
        self.update_lock = asyncio.Lock()  # one publisher at a time
        self._wanted = wanted
        self._weights = weights
        self._changed = changed
        self._sticky: Recent[Engine] = Recent()
        self._news = asyncio.Condition()

    async def watch(self) -> None:
        """Probe every engine, for ever; the task that runs this is the pool's only background work."""
        while True:
            for engine in self.engines:
                if engine.state is not EngineState.UPDATING:
                    try:
                        await self.probe(engine)
                    except StoreError as error:
                        log.error("engine %s: %s; probing again", engine.url, error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def probe(self, engine: Engine) -> None:
        """Ask an engine for its version; bring it to the one that it should serve. Raises StoreError."""
        try:
            reported = await self._ask(engine)
            async with self.update_lock:
                wanted = await self._wanted(reported)
                if reported != wanted or engine.tainted:  # perhaps only because it was updated while we waited
                    reported = await self._ask(engine)
                    wanted = await self._wanted(reported)
                if reported != wanted or engine.tainted:
                    await self.load(engine, wanted)
                else:
                    await self.set_state(engine, EngineState.SERVING)
        except (EngineError, TimeoutError) as error:
            await self.set_state(engine, EngineState.DEAD, error=str(error) or "no answer in time")

    async def _ask(self, engine: Engine) -> int | None:
        """The version that an engine reports. Raises EngineError, TimeoutError."""
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            info = await engine.client.model_info()
        engine.last_seen_at = time.time()
        engine.version = int(info.version) if info.version.isdecimal() else None
        return engine.version

    async def load(self, engine: Engine, version: int) -> float:
        """Put `version` on an engine: pause, update, check, continue. Returns the seconds that it stood still.

        Raises EngineError when the engine does not report the version afterwards.
        """
        path = await self._weights(version)
        await self.set_state(engine, EngineState.UPDATING)
        started = time.monotonic()
        engine.tainted = True
        await engine.client.pause("retract")
        try:
            await engine.client.update_weights_from_disk(path, version)
            reported = (await engine.client.model_info()).version
        finally:
            await engine.client.continue_generation()
        stall_s = time.monotonic() - started
        if reported != str(version):
            raise EngineError(f"{engine.url} reports version {reported!r} after an update to {version}")
        engine.version, engine.tainted = version, False
        await self.set_state(engine, EngineState.SERVING)
        return stall_s

    async def acquire(self, session_id: str, deadline: float) -> Engine:
        """The session's engine, or the least loaded one that serves; waits for one until `deadline` (monotonic).

        Raises EngineUnavailable when none serves in time. Give it back with `release`.
        """
        while True:
            serving = [e for e in self.engines if e.state is not EngineState.DEAD]
            if serving:
                engine = self._sticky.get(session_id)
                if engine not in serving:
                    order = hashlib.blake2b(session_id.encode()).digest()[0]
                    engine = min(serving, key=lambda e: (e.running, (serving.index(e) + order) % len(serving)))
                    self._sticky[session_id] = engine
                assert engine is not None
                engine.running += 1
                return engine
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailable("no inference engine is serving")
            try:
                async with asyncio.timeout(left), self._news:
                    await self._news.wait()
            except TimeoutError:
                continue

    def release(self, engine: Engine) -> None:
        """The call that acquired the engine is over."""
        engine.running -= 1

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._sticky.pop(session_id, None)

    async def set_state(self, engine: Engine, state: EngineState, error: str | None = None) -> None:
        """Wake who waits for an engine, and record what became of this one."""
        before, engine.state, engine.error = engine.state, state, error
        if before is not state:
            log.info("engine %s is %s%s", engine.url, state, f": {error}" if error else "")
            engine.reported = False
        async with self._news:
            self._news.notify_all()
        if not engine.reported:
            try:
                await self._changed(engine)
                engine.reported = True
            except StoreError as problem:  # the next probe tries again
                log.error("engine %s is %s, which could not be recorded: %s", engine.url, state, problem)
