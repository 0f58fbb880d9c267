"""Which key opens what, in memory: the common case of a call asks no database.

Every admin and run key is here; sessions' keys are, once they were used. What was revoked, rotated or made anywhere is
noticed at the next look: `watch`. Keys are looked up by SHA-256, so that the time it takes tells nothing about them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from agentrl.domain.schemas import Power
from agentrl.errors import StoreError
from agentrl.proxy.recent import Recent
from agentrl.store import key_records
from agentrl.store.db.codec import hash_key
from agentrl.store.key_records import Key

if TYPE_CHECKING:
    from agentrl.proxy.state import ProxyState

log = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
Look = tuple[float, dict[str, Key], dict[str, Key]]


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller; `session_id` is set for a session key."""

    power: Power
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A key that is, or once was, valid."""

    caller: Caller
    ends_at: float = math.inf  # seconds since the epoch
    revoked: bool = False


class Keyring:
    """By hash of the key. `admin_key` is the one that the proxy was started with: no look takes it away."""

    def __init__(self, admin_key: str) -> None:
        self._fixed = {hash_key(admin_key): Known(Caller(Power.ADMIN))}
        self._of_everybody = self._fixed
        self._of_sessions: Recent[Known] = Recent()
        self._looked_at = time.time()

    def get(self, key_hash: str) -> Known | None:
        """What is known of a key; None for a session's that was not used here, or for a wrong one."""
        return self._of_everybody.get(key_hash) or self._of_sessions.get(key_hash)

    def remember(self, key_hash: str, found: Key) -> Known:
        """Keep what the store says of a session's key."""
        known = self._of_sessions[key_hash] = as_known(found)
        return known

    def forget(self, key_hash: str) -> None:
        """The key's session has ended: make room."""
        self._of_sessions.pop(key_hash, None)

    def look(self, conn: Connection, run_id: str) -> Look:
        """Read what changed since the last look, for `learn`."""
        now = time.time()
        changed = key_records.changed_of_sessions(conn, run_id, self._looked_at)
        return now, key_records.of_everybody(conn, run_id), changed

    def learn(self, look: Look) -> None:
        """Take over what `look` read."""
        self._looked_at, everybody, changed = look
        self._of_everybody = {key_hash: as_known(key) for key_hash, key in everybody.items()} | self._fixed
        for key_hash, key in changed.items():
            if key_hash in self._of_sessions:
                self._of_sessions[key_hash] = as_known(key)


def as_known(found: Key) -> Known:
    """A key of the store as authentication wants it."""
    return Known(Caller(found.power, found.session_id), found.ends_at, found.revoked)


async def watch(state: ProxyState) -> None:
    """Look again and again, for ever; a database that is away is tried again."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            await refresh(state)
        except StoreError as error:
            log.error("keys: %s; looking again", error)


async def refresh(state: ProxyState) -> None:
    """Look now. Raises StoreError."""
    state.keyring.learn(await state.read(state.keyring.look, state.run_id))
