"""One request and its answers, independent of the connection: a client that leaves can come back for them.

    request ─► Exchange ─ samples in its own task ─► events ─► followers: the client, or its retry

    SAMPLING ──► DONE             all answers are committed, or the exchange replays recorded ones
       │  └────► FAILED           an error, which every follower gets
       └─ last follower leaves ─► ORPHANED ─ a retry joins ─► SAMPLING
                                      └─ grace period over ─► STOPPED

The events of an answer are kept from the first one until all of it is committed, so that a late follower gets all of
them. Once the last follower has left, a retry may claim the answer (store.calls.deliveries), at any replica. If no
retry comes in the grace period, the exchange stops and frees the engine. A committed answer can be claimed until its
session ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from agentrl.errors import RequestError, StoreError
from agentrl.proxy.calls import model_call
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.delivery_notes import DeliveryNotes
from agentrl.proxy.calls.pending_call import Call
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader
from agentrl.store.calls import deliveries

log = logging.getLogger(__name__)
Event = tuple[int, AnswerDelta | Answer]
"""(index of an answer of the request, its next part or the whole answer)."""


class ClientLeft(Exception):
    """The client has closed its connection."""


class Exchange:
    """The events of one request's answers, as they happen. `ids` are its calls, in the order of its choices."""

    def __init__(
        self, context: CallContext, notes: DeliveryNotes, header: ResponseHeader, ids: list[str], session_id: str
    ) -> None:
        self.header = header
        self.ids = ids
        self.session_id = session_id
        self.done = False
        self.stopping = False
        self._context = context
        self._notes = notes
        self._events: list[Event] = []
        self._error: RequestError | None = None
        self._followers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def replay(self, events: Sequence[Event]) -> None:
        """Answer with events that are recorded already."""
        self._events += events
        self.done = True

    def sample(self, begun: Sequence[Call], over: Callable[[], None]) -> None:
        """Begin to sample the answers. `over` is called, maybe twice, when they have ended for any reason."""
        self._task = asyncio.create_task(self._sample(begun, over))
        self._task.add_done_callback(lambda _: over())  # a task that is cancelled before it starts runs no `finally`

    async def after(self, seen: int, left: asyncio.Future[None]) -> list[Event]:
        """The events after the first `seen`, as soon as there are any; none after the end of the last answer.

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
        """Wake the followers: an event, the end or a disconnect has happened."""
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)

    def join(self) -> None:
        """A client follows from now on; a grace period that runs is cancelled."""
        self._followers += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def mark_delivered(self) -> None:
        """A client that joined has received the end."""
        self._followers -= 1
        self._notes.mark_delivered(self.ids)

    def leave(self) -> None:
        """A client that joined left before the end. When the last one leaves, a retry may claim the answer."""
        self._followers -= 1
        if self._followers:
            return
        if self._task is not None and not self.done:
            if grace_s := self._context.settings.retry_grace_s:
                self._grace = asyncio.get_running_loop().call_later(grace_s, self._give_up)
            else:
                self._cancel(self._task)
        self._notes.release(self.ids)

    async def stop(self) -> None:
        """Stop sampling, and wait until it has stopped."""
        if self._task is not None:
            self._cancel(self._task)
            await asyncio.wait([self._task])

    def _cancel(self, task: asyncio.Task[None]) -> None:
        self.stopping = True
        task.cancel()

    @property
    def orphaned(self) -> bool:
        """Whether no client follows here."""
        return not self._followers

    def _give_up(self) -> None:
        """End the grace period: stop, unless the store knows of a retry that waits at another replica."""
        self._asking = asyncio.create_task(self._stop_unless_wanted())

    async def _stop_unless_wanted(self) -> None:
        wanted = True
        with suppress(StoreError):  # unknown: ask again after another grace period
            wanted = await self._context.store.read(deliveries.is_awaited, self.ids)
        if self.done or self._followers or self._task is None:
            return
        if wanted:
            self._grace = asyncio.get_running_loop().call_later(self._context.settings.retry_grace_s, self._give_up)
        else:
            self._cancel(self._task)

    def _emit(self, choice: int, event: AnswerDelta | Answer) -> None:
        self._events.append((choice, event))
        self.wake()

    async def _sample(self, begun: Sequence[Call], over: Callable[[], None]) -> None:
        try:
            await _run_all(self._context, begun, self._emit)
        except RequestError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = RequestError(503, "the call was stopped", code="stopped", retry_after_s=1.0)
            raise
        except Exception as error:  # a defect of the proxy: the followers must get an answer
            log.exception("the calls %s failed", ", ".join(self.ids))
            self._error = RequestError(500, f"the proxy failed: {error!r}", code="internal_error")
        finally:
            self.done = True
            over()
            if self._grace is not None:
                self._grace.cancel()
            self.wake()


async def _run_all(
    context: CallContext, begun: Sequence[Call], emit: Callable[[int, AnswerDelta | Answer], None]
) -> None:
    """Sample the calls of a request side by side. When one fails, the others are stopped and its error is raised."""
    if len(begun) == 1:
        return await model_call.run(context, begun[0], partial(emit, 0))
    try:
        async with asyncio.TaskGroup() as group:
            for choice, call in enumerate(begun):
                group.create_task(model_call.run(context, call, partial(emit, choice)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
