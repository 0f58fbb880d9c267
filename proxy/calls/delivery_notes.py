"""Records which answers clients have received, and which wait for a retry, without delaying the answer.

RUNNING or COMPLETE ─► mark_delivered ─► delivered
                  └──► release ────────► free: a retry may claim it, at any replica   (store.calls.deliveries)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentrl.errors import StoreError
from agentrl.proxy.run_store import RunStore
from agentrl.store.calls import deliveries

TOGETHER_S = 0.05
"""Answers that are delivered within this time are recorded in one write."""
RETRY_S = 1.0


class DeliveryNotes:
    """Queues the writes; a write that fails is repeated until it succeeds or the database is closed."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._delivered: list[str] = []

    def mark_delivered(self, call_ids: list[str]) -> None:
        """A client has received the end of these calls' answers."""
        if not self._delivered:
            asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)
        self._delivered += call_ids

    def flush(self) -> None:
        """Queue the write of all answers that were delivered so far."""
        call_ids, self._delivered = self._delivered, []
        if call_ids:
            self._write(deliveries.mark_delivered, call_ids)

    def release(self, call_ids: list[str]) -> None:
        """The client that waited here for these calls' answer has left: a retry may claim it."""
        self._write(deliveries.release, call_ids, self._store.replica)

    def _write(self, unit: Callable[..., None], *args: Any) -> None:
        loop = asyncio.get_running_loop()

        def written(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and isinstance(future.exception(), StoreError):
                loop.call_later(RETRY_S, self._write, unit, *args)

        with suppress(StoreError):  # the database is closed
            self._store.database.asubmit(unit, *args).add_done_callback(written)
