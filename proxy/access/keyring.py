"""An in-memory cache of API keys, so that most calls need no database query.

It holds all admin and run keys, and each session key after its first use. `watch` reads the keys that any replica
created, rotated or revoked. Keys are looked up by their SHA-256, so the time of a look-up reveals nothing about a key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from agentrl.domain.schemas import Power
from agentrl.errors import StoreError
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.store import key_records
from agentrl.store.db.codec import hash_key
from agentrl.store.key_records import Changes, Key

log = logging.getLogger(__name__)
REFRESH_EVERY_S = 2.0


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
    """Keys by their hash. `admin_key` is the key that the proxy was started with; `refresh` never removes it."""

    def __init__(self, admin_key: str) -> None:
        self._fixed = {hash_key(admin_key): Known(Caller(Power.ADMIN))}
        self._of_everybody = self._fixed
        self._of_sessions: Recent[Known] = Recent()
        self._read_at = time.time()

    def get(self, key_hash: str) -> Known | None:
        """The key with this hash; None for an unknown key and for a session key that was not used here."""
        return self._of_everybody.get(key_hash) or self._of_sessions.get(key_hash)

    def remember(self, key_hash: str, found: Key) -> Known:
        """Cache a session key that was found in the store."""
        known = self._of_sessions[key_hash] = as_known(found)
        return known

    def forget(self, key_hash: str) -> None:
        """Drop the key of a session that has ended."""
        self._of_sessions.pop(key_hash, None)

    async def refresh(self, store: RunStore) -> None:
        """Read the keys that changed since the last refresh. Raises StoreError."""
        self._apply(await store.read(key_records.changes, store.run_id, self._read_at))

    def _apply(self, changes: Changes) -> None:
        self._read_at = changes.read_at
        self._of_everybody = {key_hash: as_known(key) for key_hash, key in changes.of_everybody.items()} | self._fixed
        for key_hash, key in changes.of_sessions.items():
            if key_hash in self._of_sessions:
                self._of_sessions[key_hash] = as_known(key)


def as_known(found: Key) -> Known:
    """A key record of the store, as the keyring holds it."""
    return Known(Caller(found.power, found.session_id), found.ends_at, found.revoked)


async def watch(keyring: Keyring, store: RunStore) -> None:
    """Refresh the keyring every REFRESH_EVERY_S, forever; retries when the database is unavailable."""
    while True:
        await asyncio.sleep(REFRESH_EVERY_S)
        try:
            await keyring.refresh(store)
        except StoreError as error:
            log.error("keys: %s; trying again", error)
