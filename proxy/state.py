"""What one proxy process holds. Nothing here is truth: all of it can be rebuilt from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from agentrl.domain.schemas import Json, Power
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access.heavy_work import Heavy
from agentrl.proxy.access.keyring import Keyring
from agentrl.proxy.access.limits import Gate
from agentrl.proxy.access.public_address import PublicAddress
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.metrics.counters import Metrics
from agentrl.proxy.recent import Recent
from agentrl.rendering import Renderer
from agentrl.store import Database, family
from agentrl.store.calls import deliveries
from agentrl.store.db.codec import hash_key
from agentrl.store.key_records import Key
from agentrl.store.sessions import session_lookup
from agentrl.store.sessions.session_limits import Limits

if TYPE_CHECKING:
    from agentrl.proxy.calls.call_seeds import CallSeeds
    from agentrl.proxy.calls.exchanges import Exchange
    from agentrl.proxy.calls.upstreams import Upstream

T = TypeVar("T")
GIVEN_TOGETHER_S = 0.05
NOTE_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Session:
    """What never changes about a session."""

    key_hash: str
    is_eval: bool
    sampling: Json | None  # forced on it in an evaluation
    root_id: str  # of the session that it stands under; itself, unless it is a sub-agent's


@dataclass(kw_only=True)
class ProxyState:
    """The parts that routes share. `read` and `write` run store functions off the event loop."""

    database: Database
    run_id: str
    run_name: str
    run_created_at: float
    keyring: Keyring
    replica: str
    renderer: Renderer
    pool: EnginePool
    limits: Limits
    sampling: Json  # forced on the sessions of programs, evaluations aside
    seeds: CallSeeds | None  # of calls whose programs give none; None: engines do not sample by seeds
    request_timeout_s: float
    max_body_bytes: int
    body_timeout_s: float
    gate: Gate
    public: PublicAddress
    trees: TreeCache
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)  # other models that calls may name
    http: aiohttp.ClientSession | None = None  # to call them
    metrics: Metrics = field(default_factory=Metrics)
    metrics_public: bool = False  # `/metrics` needs no key
    retry_grace_s: float = 0.0
    restore_dropped_text: bool = False
    named_sessions: bool = False  # a run key opens sessions by name
    model_aliases: Sequence[str] = ()  # shell patterns of other names of the policy
    clip_max_tokens: bool = False  # in every dialect
    heavy: Heavy = field(default_factory=Heavy)
    exchanges: dict[str, Exchange] = field(default_factory=dict)  # answers that are being sampled, by their first call
    _given: list[str] = field(default_factory=list)
    serving: set[str] = field(
        default_factory=set
    )  # the calls that this process answers for: see `sweep.close_forgotten`
    session_keys: Recent[str] = field(default_factory=Recent)  # mark of a named session or sub-agent → its id
    refusals: Recent[int] = field(default_factory=Recent)  # session id → how many were recorded here
    sessions: Recent[Session] = field(default_factory=Recent)  # that are live

    async def write(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `unit(conn, …)` in the next group commit; returns once it is durable."""
        return await self.database.asubmit(unit, *args, **kwargs)

    async def read(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `query(conn, …)` in a thread, in a transaction of its own; waits for a database that is away."""
        return await asyncio.to_thread(self.database.query, query, *args, **kwargs)

    def given(self, call_ids: list[str]) -> None:
        """Clients received the end of these calls' answers: recorded with others' that do in the same moment."""
        if not self._given:
            asyncio.get_running_loop().call_later(GIVEN_TOGETHER_S, self.record_given)
        self._given += call_ids

    def record_given(self) -> None:
        """Record now what was given."""
        call_ids, self._given = self._given, []
        if call_ids:
            self._note(deliveries.given, call_ids)

    def left(self, call_ids: list[str]) -> None:
        """The client that waited here for these calls' answer is gone: a retry may claim it."""
        self._note(deliveries.left, call_ids, self.replica)

    def _note(self, unit: Callable[..., None], *args: Any) -> None:
        """Write without waiting, and again until it is written; a proxy that stops says at its start what it knows."""
        loop = asyncio.get_running_loop()

        def written(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and isinstance(future.exception(), StoreError):
                loop.call_later(NOTE_AGAIN_S, self._note, unit, *args)

        with suppress(StoreError):  # it is closed
            self.database.asubmit(unit, *args).add_done_callback(written)

    def opened(self, session_id: str, key: str, *, is_eval: bool, sampling: Json | None) -> None:
        """A session was made just now, by this process: its first call need not ask the store."""
        session = self.sessions[session_id] = Session(hash_key(key), is_eval, sampling, session_id)
        self.keyring.remember(session.key_hash, Key(Power.SESSION, session_id))
        self.trees.plant(session_id)

    async def session(self, session_id: str) -> Session:
        """What never changes about a session; whether it is still open, the intent row's transaction decides.

        Raises RequestError 404.
        """
        session = self.sessions.get(session_id)
        if session is None:
            row = await self.read(session_lookup.get, session_id)
            if row is None or row.run_id != self.run_id:
                raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
            session = Session(row.key_hash, row.is_eval, row.sampling, family.root_of(row))
            self.sessions[session_id] = session
        return session

    def forget(self, session_id: str) -> None:
        """Drop what is cached about a session that ended here. What ends elsewhere makes room by and by: `Recent`."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.session_keys.pop(session.key_hash, None)
            self.keyring.forget(session.key_hash)
        self.gate.forget(session_id)
        self.trees.forget(session_id)
        self.pool.forget(session_id)
