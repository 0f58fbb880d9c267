"""The lease of a task runner on its rank: claimed, renewed, and lost.

claim ──► held ── renew every RENEW_EVERY_S ──► held
            ├──► lost: another runner has the rank
            └──► lost: a fenced part, and no renewal for FENCED_AFTER_S (the database's lease lasts LEASE_S)

A runner that is cut off from the database ends a fenced command before another runner may start it elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentrl.errors import StoreUnavailable, UserError
from agentrl.processes.restarts import DEATHS_WINDOW_S
from agentrl.store import Database, part_ranks
from agentrl.store.db.codec import new_id
from agentrl.store.part_ranks import Order, Rank

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE_S = 20.0
FENCED_AFTER_S = 12.0
RENEW_EVERY_S = 2.0
CLAIM_EVERY_S = 1.0


class LeaseLost(Exception):
    """The runner no longer owns its rank. Its command must end at once."""


class RankLease:
    """A runner's lease. `order` is what the part's ranks are to do, as last read; `changed` is set when it changes.

    `lost` is set before `keep` raises.
    """

    def __init__(
        self, database: Database, run_id: str, part: str, rank: int, *, host: str, address: str, fenced: bool
    ) -> None:
        self.run_id, self.part, self.rank = run_id, part, rank
        self.runner = new_id()
        self.address = address
        self.changed = asyncio.Event()
        self.lost = False
        self.order = Order("running", 0, None)
        self._database = database
        self._host = host
        self._fenced = fenced
        self._renewed_at = 0.0

    async def claim(self) -> Rank | None:
        """Wait until the rank is free, and take it; returns what its last owner left, or None when the part is to stop.

        Raises UserError when the run has no such part.
        """
        waits = False
        while True:
            await self.refresh()
            if self.over:
                return None
            asked = time.monotonic()
            place = {"host": self._host, "address": self.address}
            before = await self._transact(part_ranks.claim, self.rank, self.runner, **place, lease_s=LEASE_S)
            if before is not None:
                self._renewed_at, self.lost = asked, False
                return before
            if not waits:
                log.info("%s/%d: waiting for the lease of another task runner", self.part, self.rank)
                waits = True
            await asyncio.sleep(CLAIM_EVERY_S)

    async def keep(self) -> None:
        """Renew the lease until cancelled. Raises LeaseLost."""
        try:
            while True:
                await asyncio.sleep(RENEW_EVERY_S)
                await self._renew()
        except LeaseLost:
            self.lost = True
            raise

    async def announce(self, attempt: int, ports: Mapping[str, int]) -> None:
        """Tell the other ranks which ports this one uses in an attempt."""
        await self._transact(part_ranks.announce, self.rank, self.runner, attempt, ports)

    async def started(self, pid: int) -> None:
        """Record that the command runs."""
        await self._transact(part_ranks.started, self.rank, self.runner, pid)

    async def died(self, attempt: int, status: int | None, *, gang: bool) -> int:
        """Record a death, and move a gang to its next attempt; returns the part's deaths in DEATHS_WINDOW_S."""
        settings = {"attempt": attempt, "status": status, "gang": gang, "window_s": DEATHS_WINDOW_S}
        return await self._transact(part_ranks.died, self.rank, **settings)

    async def give_up(self, why: str) -> None:
        """Give the part up: no runner starts it again."""
        await self._transact(part_ranks.give_up, why)
        await self.refresh()

    async def release(self, status: int | None) -> None:
        """Give the rank back, with the exit status of its command."""
        await self._transact(part_ranks.release, self.rank, self.runner, status)

    async def ranks(self, part: str | None = None) -> list[Rank]:
        """The processes of this part, or of another part of the run."""
        return await asyncio.to_thread(self._database.query, part_ranks.ranks, self.run_id, part or self.part)

    async def refresh(self) -> None:
        """Read the order again. Raises UserError when the run has no such part."""
        order = await asyncio.to_thread(self._database.query, part_ranks.order, self.run_id, self.part)
        if order is None:
            raise UserError(f"the run has no part {self.part!r}")
        self._take_in(order)

    @property
    def over(self) -> bool:
        """Whether the part is to stop, or was given up."""
        return self.order.wanted == "stopped" or self.order.failure is not None

    async def _renew(self) -> None:
        asked = time.monotonic()
        renewal = asyncio.ensure_future(self._transact(part_ranks.renew, self.rank, self.runner, LEASE_S))
        await asyncio.wait({renewal}, timeout=self._left_s())
        if not renewal.done():
            raise LeaseLost(f"the database did not answer for {FENCED_AFTER_S:g} s")
        try:
            order = renewal.result()
        except StoreUnavailable as error:
            log.warning("cannot renew the lease: %s", error)
            if self._left_s() == 0.0:
                raise LeaseLost(f"the database did not answer for {FENCED_AFTER_S:g} s") from None
            return
        if order is None:
            raise LeaseLost("another task runner has the rank")
        self._renewed_at = asked
        self._take_in(order)

    async def _transact(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Write to the database in a thread. Raises StoreError."""
        return await asyncio.to_thread(self._database.transact, unit, self.run_id, self.part, *args, **kwargs)

    def _take_in(self, order: Order) -> None:
        if order != self.order:
            self.order = order
            self.changed.set()

    def _left_s(self) -> float | None:
        """Seconds for which a fenced command may go on without a renewal; None: for ever."""
        return max(0.0, self._renewed_at + FENCED_AFTER_S - time.monotonic()) if self._fenced else None
