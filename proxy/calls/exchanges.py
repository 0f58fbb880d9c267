"""One request and its answer, apart from the connection it came by: a client that leaves can come back for it.

    request ─► Exchange ─ samples in a task of its own ─► events ─► whoever follows: the client, or its retry

The events of an answer are kept from the first one until all of it is committed, so that who comes late gets all of it.
When nobody follows any more, the answer may be claimed (store.deliveries) by a retry, at any replica; nobody having
come for it in the grace period, the engine is freed. A committed answer can be claimed until its session ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from agentrl.domain.schemas import InteractionStatus
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access.limits import Admission
from agentrl.proxy.calls import model_call, recorded_answers
from agentrl.proxy.calls.model_call import Call, Caller
from agentrl.proxy.dialects.dialect import Answer, Head, ModelRequest, Piece
from agentrl.proxy.state import ProxyState
from agentrl.store.calls import deliveries
from agentrl.store.calls.deliveries import Claim

log = logging.getLogger(__name__)
Event = tuple[int, Piece | Answer]
"""Of the answer with this index among the request's."""
HELD_S = 5.0
"""A retry waits so long for an answer that another client seems to wait for: that its leaving is noticed, or that the
replica that held it is back. Then it is taken for a call of its own."""
LOOK_EVERY_S = 0.1


class ClientLeft(Exception):
    """The client is gone: there is nobody to tell."""


class Exchange:
    """The events of one request's answers, as they come. `ids` are its calls, in the order of its choices."""

    def __init__(self, state: ProxyState, head: Head, ids: list[str], session_id: str) -> None:
        self.head = head
        self.ids = ids
        self.session_id = session_id
        self.done = False
        self.stopping = False
        self._state = state
        self._events: list[Event] = []
        self._error: RequestError | None = None
        self._followers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def replay(self, events: Sequence[Event]) -> None:
        """The answers are there already."""
        self._events += events
        self.done = True

    def sample(self, begun: Sequence[Call], place: Admission) -> None:
        """Begin to sample the answers; `place` is given back when they are over."""
        self._state.exchanges[self.head.id] = self
        self._task = asyncio.create_task(self._sample(begun))
        self._task.add_done_callback(lambda _: place.close())

    async def after(self, seen: int, left: asyncio.Future[None]) -> list[Event]:
        """The events behind the first `seen`, as soon as there are any; none behind the end of the last answer.

        Raises RequestError when the answer failed, ClientLeft once `left` is done; its callback must call `wake`.
        """
        while True:
            if left.done():
                raise ClientLeft
            if seen < len(self._events):
                return self._events[seen:]
            if self._error is not None:
                raise self._error
            if self.done:
                return []
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def wake(self) -> None:
        """Something happened that followers should look at."""
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)

    def join(self) -> None:
        """A client follows from now on."""
        self._followers += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def given(self) -> None:
        """A client that joined has received the end."""
        self._followers -= 1
        self._state.given(self.ids)

    def leave(self) -> None:
        """A client that joined left before the end. The last one to leave frees the answer for its retry."""
        self._followers -= 1
        if self._followers:
            return
        if self._task is not None and not self.done:
            if grace_s := self._state.retry_grace_s:
                self._grace = asyncio.get_running_loop().call_later(grace_s, self._give_up)
            else:
                self._cancel(self._task)
        self._state.left(self.ids)

    async def stop(self) -> None:
        """Sample no more."""
        if self._task is not None:
            self._cancel(self._task)
            await asyncio.wait([self._task])

    def _cancel(self, task: asyncio.Task[None]) -> None:
        self.stopping = True
        task.cancel()

    @property
    def orphaned(self) -> bool:
        """Whether nobody here follows."""
        return not self._followers

    def _give_up(self) -> None:
        """The grace period is over; a retry at another replica may wait for the answer all the same."""
        self._asking = asyncio.create_task(self._unless_wanted())

    async def _unless_wanted(self) -> None:
        wanted = True
        with suppress(StoreError):  # nobody knows: look again
            wanted = await self._state.read(deliveries.wanted, self.ids)
        if self.done or self._followers or self._task is None:
            return
        if wanted:
            self._grace = asyncio.get_running_loop().call_later(self._state.retry_grace_s, self._give_up)
        else:
            self._cancel(self._task)

    def _tell(self, choice: int, event: Piece | Answer) -> None:
        self._events.append((choice, event))
        self.wake()

    async def _sample(self, begun: Sequence[Call]) -> None:
        try:
            await _run_all(self._state, begun, self._tell)
        except RequestError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = RequestError(503, "the call was stopped", code="stopped", retry_after_s=1.0)
            raise
        except Exception as error:  # whatever it is, those who wait are told
            log.exception("the calls %s failed", ", ".join(self.ids))
            self._error = RequestError(500, f"the proxy failed: {error!r}", code="internal_error")
        finally:
            self.done = True
            self._state.exchanges.pop(self.head.id, None)
            if self._grace is not None:
                self._grace.cancel()
            self.wake()


async def exchange_for(state: ProxyState, caller: Caller, request: ModelRequest) -> Exchange:
    """The answer to a request: a new one or, for a retry, the one that it missed. Raises RequestError."""
    deadline = time.monotonic() + state.request_timeout_s
    while caller.repeat_key is not None or caller.retry:
        if not (ids := await _claim(state, caller)):
            break
        if (found := await _earlier_or_left(state, caller, request, ids, deadline)) is not None:
            state.metrics.retried("claimed")
            return found
        await asyncio.sleep(LOOK_EVERY_S)
    if caller.retry:
        state.metrics.retried("resampled")
    while True:
        root_id = (await state.session(caller.session_id)).root_id
        place = await state.gate.admit(state, root_id, request.choices)
        begins = False
        try:
            head, begun = await model_call.prepare(state, caller, request)
            ids = await model_call.begin(state, caller, begun)
            begins = not ids
        finally:
            if not begins:
                place.cancel()
        if begins:
            exchange = Exchange(state, head, [call.id for call in begun], caller.session_id)
            exchange.sample(begun, place)
            return exchange
        if (found := await _earlier_or_left(state, caller, request, ids, deadline)) is not None:
            return found
        await asyncio.sleep(LOOK_EVERY_S)


async def _claim(state: ProxyState, caller: Caller) -> list[str]:
    """The calls whose answer a repeated request gets; none where it is to be sampled."""
    until = time.monotonic() + HELD_S
    while True:
        claim = await _claim_once(state, caller)
        if claim.ids or not claim.held or time.monotonic() > until:
            return claim.ids
        await asyncio.sleep(LOOK_EVERY_S)


async def _claim_once(state: ProxyState, caller: Caller) -> Claim:
    """What is claimed for a client that leaves meanwhile is given back."""
    if caller.repeat_key is not None:
        unit: Callable[..., Claim] = deliveries.repeated
        key: tuple[str | int, ...] = (caller.repeat_key, caller.digest)
    else:
        unit, key = deliveries.claim, (caller.digest, caller.retry)
    claiming = asyncio.ensure_future(state.write(unit, caller.session_id, *key, state.replica))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        claiming.add_done_callback(lambda done: None if done.exception() else state.left(done.result().ids))
        raise


async def _earlier_or_left(
    state: ProxyState, caller: Caller, request: ModelRequest, ids: list[str], deadline: float
) -> Exchange | None:
    """`_earlier`; when that fails, or the client leaves meanwhile, the answer may be claimed again."""
    try:
        return await _earlier(state, caller, request, ids, deadline)
    except BaseException:
        state.left(ids)
        raise


async def _earlier(
    state: ProxyState, caller: Caller, request: ModelRequest, ids: list[str], deadline: float
) -> Exchange | None:
    """The exchange of calls that were begun before, here or at another replica; None when they came to nothing.

    Raises RequestError 504 when they are not done by `deadline` (monotonic seconds).
    """
    while True:
        if (running := state.exchanges.get(ids[0])) is not None and not running.stopping:
            return running
        statuses, free = await state.read(deliveries.progress, ids)
        if statuses == {InteractionStatus.COMPLETE}:
            head, events = await recorded_answers.load(state, caller.session_id, request, ids)
            exchange = Exchange(state, head, ids, caller.session_id)
            exchange.replay(events)
            return exchange
        if not statuses <= {InteractionStatus.COMPLETE, InteractionStatus.RUNNING}:
            return None
        if time.monotonic() > deadline:
            raise RequestError(504, "the answer was not finished in time", code="deadline_exceeded")
        if free:  # the client that waited for it beside ours has left
            await state.write(deliveries.take, ids, state.replica)
        await asyncio.sleep(LOOK_EVERY_S)


async def stop_orphans(state: ProxyState) -> None:
    """Nobody will come for what clients left behind in sessions that have ended. Raises StoreError."""
    orphans = [exchange for exchange in state.exchanges.values() if exchange.orphaned]
    if orphans:
        ended = await state.read(deliveries.ended, sorted({exchange.session_id for exchange in orphans}))
        for exchange in orphans:
            if exchange.session_id in ended and exchange.orphaned:
                await exchange.stop()


async def _run_all(state: ProxyState, begun: Sequence[Call], tell: Callable[[int, Piece | Answer], None]) -> None:
    """Sample the calls of a request side by side. Raises what the first one raises that fails; it stops the others."""
    if len(begun) == 1:
        return await model_call.run(state, begun[0], partial(tell, 0))
    try:
        async with asyncio.TaskGroup() as group:
            for choice, call in enumerate(begun):
                group.create_task(model_call.run(state, call, partial(tell, choice)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
