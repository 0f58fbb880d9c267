"""Finds the answer to a request: a running or recorded one for a retry, else a new one.

no retry mark ──────────────────────────────────────────────► prepare ─► begin ─► sample
retry ─► claim (store.calls.deliveries) ─ nothing to claim ─┘
            └─ claimed ─► running here: follow it
                       └► committed: replay it from the store
                       └► running at another replica: wait until it is committed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from agentrl.domain.schemas import InteractionStatus
from agentrl.errors import RequestError
from agentrl.proxy.access.limits import Slots
from agentrl.proxy.calls import model_call, recorded_answers
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.delivery_notes import DeliveryNotes
from agentrl.proxy.calls.exchanges import Exchange
from agentrl.proxy.calls.pending_call import CallOrigin
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.store.calls import deliveries
from agentrl.store.calls.deliveries import Claim

HELD_S = 5.0
"""How long a retry waits for an answer that another client or a dead replica holds: the client may disconnect, or the
replica may restart. After that the retry is treated as a new call.
"""
POLL_S = 0.1


class AnswerFinder:
    """Finds the answer to each request. Holds the answers that this process is sampling."""

    def __init__(self, context: CallContext, notes: DeliveryNotes) -> None:
        self._context = context
        self._notes = notes
        self._sampling: dict[str, Exchange] = {}  # by the id of the request's first call

    async def find(self, origin: CallOrigin, request: ModelRequest) -> Exchange:
        """The answer to a request: a new one or, for a retry, the one that it missed. Raises RequestError."""
        context = self._context
        deadline = time.monotonic() + context.settings.request_timeout_s
        while origin.repeat_key is not None or origin.retry:
            if not (ids := await self._claim(origin)):
                break
            if (found := await self._earlier_or_release(origin, request, ids, deadline)) is not None:
                context.metrics.retried("claimed")
                return found
            await asyncio.sleep(POLL_S)
        if origin.retry:
            context.metrics.retried("resampled")
        while True:
            slots = await context.sessions.admit(origin.session_id, request.choices)
            begins = False
            try:
                header, begun = await model_call.prepare(context, origin, request)
                ids = await model_call.begin(context, origin, begun)
                begins = not ids
            finally:
                if not begins:
                    slots.cancel()
            if begins:
                exchange = Exchange(context, self._notes, header, [call.id for call in begun], origin.session_id)

                self._sampling[header.id] = exchange
                exchange.sample(begun, partial(self._over, header.id, slots))
                return exchange
            if (found := await self._earlier_or_release(origin, request, ids, deadline)) is not None:
                return found
            await asyncio.sleep(POLL_S)

    def _over(self, first_id: str, slots: Slots) -> None:
        self._sampling.pop(first_id, None)
        slots.close()

    async def stop_orphans(self) -> None:
        """Stop sampling each answer that no client follows, if its session has ended. Raises StoreError."""
        orphans = [exchange for exchange in self._sampling.values() if exchange.orphaned]
        if orphans:
            session_ids = sorted({exchange.session_id for exchange in orphans})
            ended = await self._context.store.read(deliveries.sealed_sessions, session_ids)
            for exchange in orphans:
                if exchange.session_id in ended and exchange.orphaned:
                    await exchange.stop()

    async def stop_all(self) -> None:
        """Stop every answer that is being sampled."""
        for exchange in list(self._sampling.values()):
            await exchange.stop()

    async def _claim(self, origin: CallOrigin) -> list[str]:
        """The earlier calls whose answer a repeated request gets; empty if it must be sampled."""
        until = time.monotonic() + HELD_S
        while True:
            claim = await self._claim_once(origin)
            if claim.ids or not claim.held or time.monotonic() > until:
                return claim.ids
            await asyncio.sleep(POLL_S)

    async def _claim_once(self, origin: CallOrigin) -> Claim:
        """Claim an earlier answer once. If the client leaves meanwhile, the claim is released."""
        store = self._context.store
        if origin.repeat_key is not None:
            unit: Callable[..., Claim] = deliveries.claim_by_key
            key: tuple[str | int, ...] = (origin.repeat_key, origin.digest)
        else:
            unit, key = deliveries.claim, (origin.digest, origin.retry)
        claiming = asyncio.ensure_future(store.write(unit, origin.session_id, *key, store.replica))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(
                lambda done: None if done.exception() else self._notes.release(done.result().ids)
            )
            raise

    async def _earlier_or_release(
        self, origin: CallOrigin, request: ModelRequest, ids: list[str], deadline: float
    ) -> Exchange | None:
        """`_earlier`; when it fails or the client leaves meanwhile, the claim is released."""
        try:
            return await self._earlier(origin, request, ids, deadline)
        except BaseException:
            self._notes.release(ids)
            raise

    async def _earlier(
        self, origin: CallOrigin, request: ModelRequest, ids: list[str], deadline: float
    ) -> Exchange | None:
        """The exchange of calls that began before, here or at another replica; None when one of them has failed.

        Raises RequestError 504 when they are not complete by `deadline` (monotonic seconds).
        """
        store = self._context.store
        while True:
            if (running := self._sampling.get(ids[0])) is not None and not running.stopping:
                return running
            statuses, free = await store.read(deliveries.progress, ids)
            if statuses == {InteractionStatus.COMPLETE}:
                header, events = await recorded_answers.load(self._context, origin.session_id, request, ids)
                exchange = Exchange(self._context, self._notes, header, ids, origin.session_id)
                exchange.replay(events)
                return exchange
            if not statuses <= {InteractionStatus.COMPLETE, InteractionStatus.RUNNING}:
                return None
            if time.monotonic() > deadline:
                raise RequestError(504, "the answer was not finished in time", code="deadline_exceeded")
            if free:  # the other client that waited for it has left
                await store.write(deliveries.reclaim, ids, store.replica)
            await asyncio.sleep(POLL_S)
