"""Who fell silent: this replica says that it lives, and deals with what dead workers, programs and replicas left.

Every replica does so for the whole run; a session or a call is dealt with once, because each decision is one
transaction. Silence counts only while somebody was there to hear it: `Ears`.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sqlalchemy import Connection

from agentrl.errors import RequestError, StoreError
from agentrl.proxy.state import ProxyState
from agentrl.store import heartbeats, interactions, sessions
from agentrl.store.sessions import Limits

log = logging.getLogger(__name__)
EVERY_S = 2.0
TOGETHER = 32  # sessions that are looked at together share a commit


class Ears:
    """Since when this replica has listened without a gap (seconds since the epoch): silence before proves nothing.

    A gap is an outage of this process or of the database, when nobody's heartbeat could be stored.
    """

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self.since = self.last = time.time()

    def listen(self) -> float:
        """Something was just heard from the database; returns `since`."""
        now = time.time()
        if now - self.last > self.gap_s:
            self.since = now
        self.last = now
        return self.since


async def sweep(state: ProxyState) -> None:
    """Sweep for ever. What the database refuses is logged and tried again."""
    patience_s = state.limits.heartbeat_timeout_s
    ears = Ears(patience_s / 4)
    while True:
        await asyncio.sleep(min(EVERY_S, patience_s / 10))
        try:
            await sweep_once(state, ears)
        except StoreError as error:
            log.error("%s; sweeping again", error)


async def sweep_once(state: ProxyState, ears: Ears) -> None:
    """Send our heartbeat, then look at silent replicas and at the sessions that are due. Raises StoreError."""
    await state.write(heartbeats.beat, state.run_id, "proxy", state.replica)
    ears.listen()
    silent_since = time.time() - state.limits.heartbeat_timeout_s
    if ears.since <= silent_since:
        for replica in await state.read(_silent_serving, state.run_id, silent_since):
            if lost := await state.write(_bury, state.run_id, replica, silent_since, ears.last + ears.gap_s):
                log.warning("replica %s is silent: %d of its calls are lost", replica, lost)
    due = await state.read(sessions.due, state.run_id)
    for first in range(0, len(due), TOGETHER):
        ears.listen()
        async with asyncio.TaskGroup() as looking:
            for session_id in due[first : first + TOGETHER]:
                looking.create_task(_look_at(state, session_id, ears.since, ears.last + ears.gap_s))


async def _look_at(state: ProxyState, session_id: str, heard_since: float, valid_until: float) -> None:
    """One session; what is wrong with it keeps no other from its end."""
    try:
        if await state.write(_look, session_id, state.limits, heard_since, valid_until):
            log.warning("session %s was abandoned", session_id)
            state.forget(session_id)
    except (StoreError, RequestError) as error:
        log.error("session %s: %s", session_id, error)


def _silent_serving(conn: Connection, run_id: str, since: float) -> list[str]:
    silent = set(heartbeats.silent(conn, run_id, "proxy", since))
    return sorted(silent & interactions.serving_replicas(conn, run_id)) if silent else []


def _bury(conn: Connection, run_id: str, replica: str, silent_since: float, valid_until: float) -> int:
    """What a silent replica's calls had sampled is lost: their sessions need not wait for it.

    Does nothing after `valid_until`: a decision that had to wait for the database is made anew.
    """
    if time.time() > valid_until or heartbeats.last(conn, run_id, "proxy", replica) >= silent_since:
        return 0
    return interactions.declare_lost(conn, run_id, replica)


def _look(conn: Connection, session_id: str, limits: Limits, heard_since: float, valid_until: float) -> bool:
    """`sessions.look`, but not after `valid_until`."""
    return time.time() <= valid_until and sessions.look(conn, session_id, limits, heard_since=heard_since)
