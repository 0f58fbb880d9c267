"""One run's part of the database, as one replica of the proxy reads and writes it off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.store import Database
from agentrl.store.sessions.session_limits import Limits

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """The database, the run that this proxy serves, and the name of this replica."""

    database: Database
    run_id: str
    run_name: str
    run_created_at: float  # seconds since the epoch
    replica: str
    limits: Limits

    async def write(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `unit(conn, …)` in the next group commit; returns once it is durable."""
        return await self.database.asubmit(unit, *args, **kwargs)

    async def read(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `query(conn, …)` in a thread, in its own transaction; retries while the database is unavailable."""
        return await asyncio.to_thread(self.database.query, query, *args, **kwargs)

    async def read_then(self, work: Callable[[S], T], query: Callable[..., S], *args: Any, **kwargs: Any) -> T:
        """`work` applied to the result of `query(conn, …)`, in the same thread, once the transaction has ended."""

        def run() -> T:
            return work(self.database.query(query, *args, **kwargs))

        return await asyncio.to_thread(run)

    def submit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Queue `unit(conn, …)` for the next group commit without waiting for it. Raises StoreError when closed."""
        return self.database.submit(unit, *args, **kwargs)
