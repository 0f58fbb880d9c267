"""The sweep: sends this replica's heartbeat, and ends the sessions and calls of participants without one.

Participants are rollout workers, outside programs and other replicas. Every replica sweeps for the whole run. Each
decision is one transaction, so a session or a call is ended once. Silence counts only while this replica could have
received a heartbeat: `Uptime`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agentrl.domain.schemas import InteractionStatus, Json
from agentrl.errors import StoreError
from agentrl.proxy.run_store import RunStore
from agentrl.store import heartbeats, silence
from agentrl.store.calls import running_calls
from agentrl.store.db import codec
from agentrl.store.sessions.ends import liveness

log = logging.getLogger(__name__)
EVERY_S = 2.0
PAGE = 256  # due sessions that one read returns
TOGETHER = 8  # due sessions that are checked together, in one commit
PUT_OFF_S = 60.0  # time until a session is checked again after a failed check
FORGOTTEN_S = 5.0


class Uptime:
    """Since when this replica has run without a gap (seconds since the epoch); earlier silence proves nothing.

    A gap is an outage of this process or of the database, during which no heartbeat could be stored.
    """

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self.since = self.last = time.time()

    def renew(self) -> float:
        """The database has answered; returns `since`."""
        now = time.time()
        if now - self.last > self.gap_s:
            self.since = now
        self.last = now
        return self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The sweep of one replica."""

    store: RunStore
    serving: set[str]  # ids of the calls that this process is answering
    forget: Callable[[str], None]  # drops an abandoned session from this process's caches
    stop_orphans: Callable[[], Awaitable[None]]
    about: Callable[[], Json]  # what the heartbeat says about this replica

    async def run(self) -> None:
        """Beat and sweep forever, in two tasks, so that a long sweep delays no heartbeat. Retries after StoreError."""
        uptime = Uptime(self.store.limits.heartbeat_timeout_s / 4)
        async with asyncio.TaskGroup() as tasks:
            for step in (self.beat, self.once):
                tasks.create_task(self._repeat(step, uptime))

    async def _repeat(self, step: Callable[[Uptime], Coroutine[Any, Any, None]], uptime: Uptime) -> None:
        while True:
            await asyncio.sleep(min(EVERY_S, self.store.limits.heartbeat_timeout_s / 10))
            try:
                await step(uptime)
            except StoreError as error:
                log.error("%s; trying again", error)

    async def beat(self, uptime: Uptime) -> None:
        """Store our heartbeat: while that works, other participants can store theirs. Raises StoreError."""
        await self.store.write(heartbeats.beat, self.store.run_id, "proxy", self.store.replica, self.about())
        uptime.renew()

    async def once(self, uptime: Uptime) -> None:
        """Check our forgotten calls, silent replicas, and every session that is due. Raises StoreError."""
        store = self.store
        await self.close_forgotten()
        await self.stop_orphans()
        silent_since = time.time() - store.limits.heartbeat_timeout_s
        if uptime.since <= silent_since:
            for replica in await store.read(silence.silent_replicas, store.run_id, silent_since):
                valid_until = uptime.last + uptime.gap_s
                lost = await store.write(silence.declare_replica_lost, store.run_id, replica, silent_since, valid_until)
                if lost:
                    log.warning("replica %s is silent: %d of its calls are lost", replica, lost)
        skip = 0
        while due := await store.read(liveness.due, store.run_id, skip=skip, limit=PAGE):
            for first in range(0, len(due), TOGETHER):
                checks = [self._check(session_id, uptime) for session_id in due[first : first + TOGETHER]]
                skip += (await asyncio.gather(*checks)).count(False)  # these stay due, ahead of the others

    async def close_forgotten(self) -> None:
        """Close the rows of our calls that no task is answering: their end, or their start, could not be stored.

        A running call keeps its session alive, so an open row would keep it alive for as long as this process lives.
        """
        store = self.store
        running = await store.read(running_calls.of_replica, store.run_id, store.replica, time.time() - FORGOTTEN_S)
        for call_id in running:
            if call_id not in self.serving:
                log.warning("call %s was forgotten", call_id)
                why = "how it ended could not be recorded"
                await store.write(running_calls.fail, call_id, InteractionStatus.LOST, why)

    async def _check(self, session_id: str, uptime: Uptime) -> bool:
        """Whether a due session was ended, put off or given a later time. Errors of one check delay no other."""
        valid_until = uptime.last + uptime.gap_s
        try:
            abandoned = await self.store.write(
                silence.check_session, session_id, self.store.limits, uptime.since, valid_until
            )
        except StoreError as error:
            log.error("session %s: %s", session_id, error)
            return False
        except Exception as error:  # a defect that this session meets: recorded, and tried again later
            log.exception("session %s cannot be dealt with; it is tried again in %g s", session_id, PUT_OFF_S)
            return await self._put_off(session_id, repr(error))
        if abandoned:
            log.warning("session %s was abandoned", session_id)
            self.forget(session_id)
        return abandoned is not None

    async def _put_off(self, session_id: str, why: str) -> bool:
        """Record that the check of a session fails; returns whether the store took the record."""
        stuck = (self.store.run_id, session_id, codec.error_text(why), self.store.replica, time.time() + PUT_OFF_S)
        try:
            await self.store.write(silence.record_stuck, *stuck)
        except StoreError as error:
            log.error("session %s: %s", session_id, error)
            return False
        return True
