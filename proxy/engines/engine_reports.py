"""What replicas tell each other about engines, through the engines' rows, and whom they believe.

    a call or a probe of any replica fails ─► dead: for itself at once, for the others at their next read of the fleet
    a watcher reads "dead" and probes      ─► the engine answers ─► serving, for all

1. A replica that fails to reach an engine sends it no call until a probe of its own has reached it, whatever others
   say.
2. It tells the others, in one write however many calls fail. A write replaces only the row that its replica knew when
   it looked at the engine, so old observations never replace newer ones.
3. The others believe it at once. The engine's watchers probe at once, so a false word costs them the engine for the
   time of a read and a probe.
4. A replica whose word another one has corrected within CORRECTED_S, without an update of the weights in between, has
   probably lost its own way to the engine. It does not tell about this engine again for QUIET_S, twice as long each
   time, and keeps off the engine alone. This ends when the replica that corrected it is gone.
5. Between two reads of the fleet a replica takes at most a quarter of the engines from the others.
6. A replica without others decides alone.

So a replica that is cut off from some engines takes each of them from the others for about a second, once; after that
only from itself. A replica that is cut off from the database tells nothing, and its heartbeats end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from agentrl.errors import EngineError, EngineUnavailable, StoreError
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.store.engine_rows import Member

log = logging.getLogger(__name__)
CORRECTED_S = 10.0
"""An engine that died and serves again within this time was not dead: no engine starts as fast."""
QUIET_S, LONGEST_QUIET_S = 60.0, 3600.0
SHARE = 4
"""A replica takes at most one engine in SHARE from the others between two reads, but at least one."""


class EngineReports:
    """Sets the states of engines, tells them to the other replicas, and takes over what these tell.

    `notify` wakes the calls that wait for an engine.
    """

    def __init__(self, records: EngineRecords, notify: Callable[[], None], *, by_adapter: bool) -> None:
        self._records = records
        self._notify = notify
        self._by_adapter = by_adapter
        self._others: frozenset[str] = frozenset()
        self._may_take = 1

    def fleet_was_read(self, others: frozenset[str], n_engines: int) -> None:
        """The fleet was read: `others` are the other live replicas."""
        self._others = others
        self._may_take = max(1, n_engines // SHARE)

    async def set_state(self, engine: Engine, state: EngineState, error: str | None = None) -> None:
        """Set the state that this replica has seen, and tell it."""
        self._set(engine, state, error)
        await self._tell(engine)

    async def lost(self, engine: Engine, error: EngineError | str) -> None:
        """Set an engine to dead; after an EngineUnavailable or a time-out, it was not reached."""
        engine.unreached |= not isinstance(error, EngineError) or isinstance(error, EngineUnavailable)
        await self.set_state(engine, EngineState.DEAD, str(error))

    async def take_over(self, engine: Engine, row: Member) -> None:
        """Believe a row that is newer than what this replica knows. Raises StoreError."""
        if not engine.telling:
            await self._believe(engine, row)

    async def _believe(self, engine: Engine, row: Member) -> None:
        state = EngineState(row.state)
        adapter = None
        if state is EngineState.SERVING and row.version is not None and self._by_adapter:
            adapter, folder = await self._records.adapter(row.version)
            engine.folder = folder or engine.folder
        engine.row, engine.draining = row, row.draining
        if row.updater == self._records.replica and engine.lock.locked():
            return  # we are updating it, and tell the outcome
        if state is EngineState.SERVING:
            self._note_correction(engine, row)
        if state is not EngineState.DEAD and engine.unreached:
            engine.probe_due.set()  # rule 1
            return
        if state is EngineState.SERVING:
            engine.version, engine.adapter = row.version, adapter
        self._set(engine, state, row.error)
        engine.paused = state is EngineState.UPDATING and row.updater is not None
        if state is EngineState.DEAD:
            engine.probe_due.set()

    def _note_correction(self, engine: Engine, row: Member) -> None:
        told, engine.told = engine.told, None
        now = time.monotonic()
        if told is None or row.seen_by == self._records.replica:
            return
        if row.changes > told + 1 or now - engine.told_at > CORRECTED_S:
            engine.quiet_s = 0.0
            return
        engine.quiet_s = min(2 * engine.quiet_s or QUIET_S, LONGEST_QUIET_S)
        engine.quiet_until, engine.quiet_for = now + engine.quiet_s, row.seen_by
        log.warning("engine %s answers %s: this replica alone does not reach it", engine.url, row.seen_by)

    def _set(self, engine: Engine, state: EngineState, error: str | None) -> None:
        before, engine.state, engine.error = engine.state, state, error
        engine.paused = engine.paused and state is EngineState.UPDATING
        if state is EngineState.DEAD:
            engine.paused_since = engine.prepares = engine.preparing_since = engine.newer = None
        if before is not state:
            log.info("engine %s is %s%s", engine.url, state, f": {error}" if error else "")
        self._notify()

    async def _tell(self, engine: Engine) -> None:
        """Record the state, unless the store has it, or a task is recording it: that one looks again afterwards."""
        if engine.telling:
            return
        engine.telling = True
        newer: Member | None = None
        try:
            while self._is_news(engine) and self._may_tell(engine):
                recorded, row = await self._records.save(engine)
                if not recorded:
                    newer = row
                    break
                engine.row, engine.seen = row, 0 if row is None else row.changes
                if engine.unreached and engine.state is EngineState.DEAD:
                    engine.told, engine.told_at = engine.changes, time.monotonic()
                    self._may_take -= 1
            if newer is not None:  # another replica has looked at it later
                await self._believe(engine, newer)
        except StoreError as problem:  # the next probe tries again
            log.error("engine %s is %s, which could not be recorded: %s", engine.url, engine.state, problem)
        finally:
            engine.telling = False

    def _is_news(self, engine: Engine) -> bool:
        row = engine.row
        if row is None or row.state != engine.state.value:
            return True
        return engine.state is EngineState.SERVING and row.version != engine.version

    def _may_tell(self, engine: Engine) -> bool:
        """Rules 4 to 6."""
        if engine.state is not EngineState.DEAD or not engine.unreached or not self._others:
            return True
        quiet = time.monotonic() < engine.quiet_until and engine.quiet_for in self._others
        return not quiet and self._may_take > 0
