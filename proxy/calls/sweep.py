"""Who fell silent: this replica says that it lives, and deals with what dead workers, programs and replicas left.

Every replica does so for the whole run; a session or a call is dealt with once, because each decision is one
transaction. Silence counts only while somebody was there to hear it: `Ears`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.domain.schemas import InteractionStatus
from agentrl.errors import StoreError
from agentrl.proxy.calls import exchanges
from agentrl.proxy.state import ProxyState
from agentrl.store import heartbeats, silence
from agentrl.store.calls import interactions
from agentrl.store.db import codec
from agentrl.store.sessions import liveness

log = logging.getLogger(__name__)
EVERY_S = 2.0
PAGE = 256  # sessions that are asked for at once
TOGETHER = 8  # those of them that are looked at together share a commit
PUT_OFF_S = 60.0  # a session that cannot be dealt with is looked at again after so long
FORGOTTEN_S = 5.0


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
    """Beat and sweep for ever, apart, so that much work silences nobody. What the database refuses is tried again."""
    ears = Ears(state.limits.heartbeat_timeout_s / 4)
    async with asyncio.TaskGroup() as tasks:
        for what in (beat, sweep_once):
            tasks.create_task(_for_ever(what, state, ears))


async def _for_ever(
    what: Callable[[ProxyState, Ears], Coroutine[Any, Any, None]], state: ProxyState, ears: Ears
) -> None:
    while True:
        await asyncio.sleep(min(EVERY_S, state.limits.heartbeat_timeout_s / 10))
        try:
            await what(state, ears)
        except StoreError as error:
            log.error("%s; trying again", error)


async def beat(state: ProxyState, ears: Ears) -> None:
    """Store our heartbeat: where it comes through, others' do. Raises StoreError."""
    await state.write(heartbeats.beat, state.run_id, "proxy", state.replica)
    ears.listen()


async def sweep_once(state: ProxyState, ears: Ears) -> None:
    """Look at our forgotten calls, at silent replicas, and at every session that is due. Raises StoreError."""
    await close_forgotten(state)
    await exchanges.stop_orphans(state)
    silent_since = time.time() - state.limits.heartbeat_timeout_s
    if ears.since <= silent_since:
        for replica in await state.read(silence.silent_replicas, state.run_id, silent_since):
            if lost := await state.write(
                silence.declare_replica_lost, state.run_id, replica, silent_since, ears.last + ears.gap_s
            ):
                log.warning("replica %s is silent: %d of its calls are lost", replica, lost)
    skip = 0
    while due := await state.read(liveness.due, state.run_id, skip=skip, limit=PAGE):  # what follows is due by now
        for first in range(0, len(due), TOGETHER):
            looks = [_look_at(state, session_id, ears) for session_id in due[first : first + TOGETHER]]
            skip += (await asyncio.gather(*looks)).count(False)  # they stay in front of the others


async def close_forgotten(state: ProxyState) -> None:
    """Close calls of ours that nobody answers for: how they ended could not be stored, or their start was in doubt.

    A call that runs keeps its session alive, so one that is left running would do so for as long as we live.
    """
    running = await state.read(interactions.running_of, state.run_id, state.replica, time.time() - FORGOTTEN_S)
    for call_id in running:
        if call_id not in state.serving:
            log.warning("call %s was forgotten", call_id)
            why = "how it ended could not be recorded"
            await state.write(interactions.fail, call_id, InteractionStatus.LOST, why)


async def _look_at(state: ProxyState, session_id: str, ears: Ears) -> bool:
    """Whether a session was dealt with or put off; whatever is wrong with it keeps no other from its end."""
    try:
        abandoned = await state.write(
            silence.check_session, session_id, state.limits, ears.since, ears.last + ears.gap_s
        )
    except StoreError as error:
        log.error("session %s: %s", session_id, error)
        return False
    except Exception as error:  # whatever it is, it is this session's: told, and tried again
        log.exception("session %s cannot be dealt with; it is tried again in %g s", session_id, PUT_OFF_S)
        return await _put_off(state, session_id, repr(error))
    if abandoned:
        log.warning("session %s was abandoned", session_id)
        state.forget(session_id)
    return abandoned is not None


async def _put_off(state: ProxyState, session_id: str, why: str) -> bool:
    """Whether it could be stored that a session is stuck."""
    try:
        due_again_at = time.time() + PUT_OFF_S
        stuck = (state.run_id, session_id, codec.error_text(why), state.replica, due_again_at)
        await state.write(silence.record_stuck, *stuck)
    except StoreError as error:
        log.error("session %s: %s", session_id, error)
        return False
    return True
