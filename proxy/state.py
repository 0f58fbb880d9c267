"""What one proxy process holds. Nothing here is truth: all of it can be rebuilt from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from sqlalchemy import Row

from agentrl.proxy.pool import EnginePool
from agentrl.proxy.recent import Recent
from agentrl.proxy.tree import TreeCache
from agentrl.rendering import Renderer
from agentrl.schemas import Json
from agentrl.store import Database
from agentrl.store.sessions import Limits

if TYPE_CHECKING:
    from agentrl.proxy.upstreams import Upstream

T = TypeVar("T")


@dataclass(kw_only=True)
class ProxyState:
    """The parts that routes share. `read` and `write` run store functions off the event loop."""

    database: Database
    run_id: str
    run_name: str
    run_created_at: float
    admin_key: str
    run_key_hash: str
    replica: str
    renderer: Renderer
    pool: EnginePool
    limits: Limits
    sampling: Json  # forced on training sessions
    request_timeout_s: float
    max_body_bytes: int
    trees: TreeCache
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)  # other models that calls may name
    http: aiohttp.ClientSession | None = None  # to call them
    serving: set[str] = field(
        default_factory=set
    )  # the calls that this process answers for: see `sweep.close_forgotten`
    session_keys: Recent[str] = field(default_factory=Recent)  # key hash → session id
    sessions: Recent[Row[Any]] = field(default_factory=Recent)  # immutable facts of live sessions

    async def write(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `unit(conn, …)` in the next group commit; returns once it is durable."""
        return await self.database.asubmit(unit, *args, **kwargs)

    async def read(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `query(conn, …)` in a thread, in a transaction of its own; waits for a database that is away."""
        return await asyncio.to_thread(self.database.query, query, *args, **kwargs)

    def forget(self, session_id: str) -> None:
        """Drop what is cached about a session that ended here. What ends elsewhere makes room by and by: `Recent`."""
        row = self.sessions.pop(session_id, None)
        if row is not None:
            self.session_keys.pop(row.key_hash, None)
        self.trees.forget(session_id)
        self.pool.forget(session_id)
