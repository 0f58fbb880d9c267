"""This process's caches about the sessions that call it. The store holds all of their contents."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.domain.schemas import Json, Power
from agentrl.errors import no_session
from agentrl.proxy.access.keyring import Keyring
from agentrl.proxy.access.limits import Gate, Slots
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.store import family
from agentrl.store.db.codec import hash_key
from agentrl.store.key_records import Key
from agentrl.store.sessions import session_lookup


@dataclass(frozen=True, slots=True)
class Session:
    """The immutable facts of a session."""

    key_hash: str
    is_eval: bool
    is_baseline: bool  # its calls are greedy
    sampling: Json | None  # forced on an evaluation session
    root_id: str  # the session at the top of its tree: its own id for a session without a parent


class LiveSessions:
    """Caches sessions, and removes a session from every cache of this process once it has ended."""

    def __init__(self, store: RunStore, keyring: Keyring, gate: Gate, trees: TreeCache, pool: EnginePool) -> None:
        self.named: Recent[str] = Recent()  # key hash of a named session or sub-agent → the session's id
        self._sessions: Recent[Session] = Recent()
        self._store = store
        self._keyring = keyring
        self._gate = gate
        self._trees = trees
        self._pool = pool

    async def get(self, session_id: str) -> Session:
        """The immutable facts of a session. The transaction of the intent row checks whether it is open.

        Raises RequestError 404.
        """
        session = self._sessions.get(session_id)
        if session is None:
            row = await self._store.read(session_lookup.get, session_id)
            if row is None or row.run_id != self._store.run_id:
                raise no_session(session_id)
            session = Session(row.key_hash, row.is_eval, row.is_baseline, row.sampling, family.root_of(row))
            self._sessions[session_id] = session
        return session

    async def admit(self, session_id: str, answers: int, *, samples: bool = True) -> Slots:
        """The slots for a request of a session. Raises RequestError as `Gate.admit` does, 404."""
        root_id = (await self.get(session_id)).root_id
        return await self._gate.admit(self._store, root_id, answers, samples=samples)

    def opened(
        self, session_id: str, key: str, *, is_eval: bool, sampling: Json | None, is_baseline: bool = False
    ) -> None:
        """Cache a session that this process has just opened: its first call then needs no read of the store."""
        session = self._sessions[session_id] = Session(hash_key(key), is_eval, is_baseline, sampling, session_id)
        self._keyring.remember(session.key_hash, Key(Power.SESSION, session_id))
        self._trees.plant(session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session that ended here. Sessions that end at other replicas leave the caches by age: `Recent`."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.named.pop(session.key_hash, None)
            self._keyring.forget(session.key_hash)
        self._gate.forget(session_id)
        self._trees.forget(session_id)
        self._pool.forget(session_id)
