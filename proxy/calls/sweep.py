"""The sweep: sends this replica's heartbeat, and ends the sessions and calls of participants without one.

It also gives up the free places of groups that no session joins any more.

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
from agentrl.store.sessions.ends import liveness, missing_places

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
        """Check our forgotten calls, silent replicas, and every session and group that is due. Raises StoreError."""
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
        await self._check_all(liveness.due, self._check_session, uptime)
        await self._check_all(missing_places.due, self._check_group, uptime)

    async def _check_all(
        self, due: Callable[..., list[str]], check: Callable[[str, Uptime], Awaitable[bool]], uptime: Uptime
    ) -> None:
        """Check everything that a query of due rows finds, page by page."""
        skip = 0
        while ids := await self.store.read(due, self.store.run_id, skip=skip, limit=PAGE):
            for first in range(0, len(ids), TOGETHER):
                checks = [check(row_id, uptime) for row_id in ids[first : first + TOGETHER]]
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

    async def _check_session(self, session_id: str, uptime: Uptime) -> bool:
        """Whether a due session was ended, put off or given a later time."""
        abandoned = await self._check(
            f"session {session_id}", session_id, silence.check_session, silence.record_stuck, uptime
        )
        if abandoned:
            log.warning("session %s was abandoned", session_id)
            self.forget(session_id)
        return abandoned is not None

    async def _check_group(self, group_id: str, uptime: Uptime) -> bool:
        """Whether a due group was closed, put off or given a later time."""
        closed = await self._check(
            f"group {group_id}", group_id, silence.check_group, silence.record_stuck_group, uptime
        )
        if closed:
            log.warning("group %s: no session joined it for too long, its missing places were given up", group_id)
        return closed is not None

    async def _check(
        self, name: str, row_id: str, check: Callable[..., bool | None], stuck: Callable[..., None], uptime: Uptime
    ) -> bool | None:
        """The decision of a check; None where it stays due. Errors of one check delay no other."""
        try:
            return await self.store.write(check, row_id, self.store.limits, uptime.since, uptime.last + uptime.gap_s)
        except StoreError as error:
            log.error("%s: %s", name, error)
            return None
        except Exception as error:  # a defect that this row meets: recorded, and tried again later
            log.exception("%s cannot be dealt with; it is tried again in %g s", name, PUT_OFF_S)
            return await self._put_off(name, row_id, stuck, repr(error))

    async def _put_off(self, name: str, row_id: str, stuck: Callable[..., None], why: str) -> bool | None:
        """Record that a check fails; None where the store does not take the record."""
        fact = (self.store.run_id, row_id, codec.error_text(why), self.store.replica, time.time() + PUT_OFF_S)
        try:
            await self.store.write(stuck, *fact)
        except StoreError as error:
            log.error("%s: %s", name, error)
            return None
        return False
