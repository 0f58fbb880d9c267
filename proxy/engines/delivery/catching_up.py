"""Engines that are behind the run (`publish.lag`): each changes to the run's version when it has no calls.

    run at v7, lag 2:   v5, v6 may stay ─ idle, or the least loaded of all ─► v7       `next_wave`
                        v4 had to change before the run moved to v7                    `publishing`

Invariants:

1. The run moves to version n only when every serving engine is on n or on one of the last `lag` ancestors of n, all of
   them published (`publishes.within_lag`). So a token that is sampled while the run's version is n is at most `lag`
   versions older than n. A step trains tokens of at most `trainer.max_staleness` versions, so admission lets groups run
   ahead by `max_staleness − lag` only; whatever happens, the lease leaves older tokens out.
2. An engine only ever changes to the run's version, if that is published, or to a version that is being published;
   catching up never takes one back from a newer version. A version that was rolled back is no ancestor of the run's
   version and no target, so no engine changes to it, and a probe updates one that has it (`Updates.bring`) as soon as
   the run has another version.
3. An engine that is behind changes under a claim, as in a publish: two replicas never change one engine, and what a
   killed replica leaves paused is repaired by another one, to the run's version.
4. A replica knows its own calls. With several, an engine that is idle for one may have calls of another; these continue
   with the new weights, as in every publish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import EngineError, StoreError
from agentrl.proxy.engines.delivery.preparations import Preparations
from agentrl.proxy.engines.delivery.wave_run import Pace
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.version_delivery import Delivery, EngineBusy, Loaded, Prepared, RecordedFolder
from agentrl.proxy.engines.waves import Candidate, Need, next_wave

log = logging.getLogger(__name__)
EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchingUp:
    """Moves the engines that this replica watches. `catch_up`, `lost` and `peers` are the pool's.

    `run_version` is the run's version, as this replica read it last; `target` reads the version to change to, if any.
    """

    run_version: Callable[[], int | None]
    target: Callable[[], Awaitable[tuple[int, RecordedFolder] | None]]
    preparations: Preparations | None
    pace: Pace
    catch_up: Callable[[Engine, int, Delivery, Prepared | None], Awaitable[Loaded]]
    lost: Callable[[Engine, EngineError], Awaitable[None]]
    peers: Callable[[Engine], list[Engine]]
    called: asyncio.Event
    """Set when the last call of an engine has ended."""

    async def run(self, engines: Callable[[], Sequence[Engine]]) -> None:
        """Move engines until cancelled."""
        while True:
            try:
                await self.once(engines())
            except StoreError as error:
                log.error("engines that are behind the run wait: %s", error)
            self.called.clear()
            try:
                async with asyncio.timeout(EVERY_S):
                    await self.called.wait()
            except TimeoutError:
                continue

    async def once(self, engines: Sequence[Engine]) -> list[str]:
        """Move the engines that may change now; returns their URLs. Raises StoreError."""
        behind = {engine.url: engine for engine in engines if self._is_behind(engine)}
        if not behind:
            return []
        target = await self.target()
        if target is None:
            return []
        version, folder = target
        candidates = [_candidate(engine, version, engine.url in behind) for engine in engines]
        wave = next_wave(candidates, serving_share=self.pace.serving_share, parallel=self.pace.parallel)
        running = {url: behind[url].running for url in wave}
        await asyncio.gather(*(self._move(behind[url], version, folder, running[url]) for url in wave))
        return wave

    def _is_behind(self, engine: Engine) -> bool:
        """Whether this replica may move an engine to the run's version: not from one that is being published."""
        mine = engine.mine and engine.state is EngineState.SERVING and not engine.lock.locked()
        run = self.run_version()
        return mine and engine.version is not None and run is not None and engine.version < run

    async def _move(self, engine: Engine, version: int, folder: RecordedFolder, running: int) -> None:
        """Change one engine, unless calls have begun on it since it was chosen. Raises StoreError."""
        try:
            prepared = await self._prepared(engine, version, folder)
            if engine.running <= running:
                await self.catch_up(engine, version, Delivery(folder=folder), prepared)
        except EngineBusy:
            return
        except EngineError as error:
            await self.lost(engine, error)

    async def _prepared(self, engine: Engine, version: int, folder: RecordedFolder) -> Prepared | None:
        if self.preparations is None or (wish := self.preparations.wish(version, folder, {})) is None:
            return None
        return await self.preparations.advance(engine, wish, self.peers(engine))


def _candidate(engine: Engine, version: int, is_behind: bool) -> Candidate:
    changing = engine.state is EngineState.UPDATING
    return Candidate(
        url=engine.url,
        need=Need.IDLE if is_behind else Need.NOTHING,
        in_service=changing or engine.state is EngineState.SERVING,
        changing=changing,
        current=engine.version == version,
        running=engine.running,
    )
