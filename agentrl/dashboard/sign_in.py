"""Sign-in by key: the browser gets a signed cookie that names the key's hash, never the key.

    key ─► Door.sign_in ─► cookie EXPIRES.KEY_HASH.SIGNATURE ─► Door.find ─► Viewer

Every request looks the key up again, so a key that was revoked or has expired opens nothing from then on.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Protocol

from agentrl.store.db.codec import hash_key

COOKIE = "agentrl_viewer"
LASTS_S = 12 * 3600
"""How long a sign-in lasts."""
LONGEST_COOKIE = 300


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks: at one run, or at every run of the database (`run_id` is None)."""

    run_id: str | None = None

    def may_see(self, run_id: str) -> bool:
        """Whether the viewer may look at this run."""
        return self.run_id in (None, run_id)


class Door(Protocol):
    """Decides which keys open the dashboard."""

    async def find(self, key_hash: str) -> Viewer:
        """The viewer with the key of this hash.

        Raises RequestError 401 for a key that is unknown, revoked or expired, 403 for one that opens no pages.
        """
        ...


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs cookies. Processes with the same secret accept each other's."""

    secret: bytes

    @classmethod
    def of(cls, key: str) -> Signer:
        """A signer whose secret follows from a key. Slow to guess, since each viewer holds a signature."""
        return cls(hashlib.scrypt(key.encode(), salt=b"agentrl dashboard", n=2**14, r=8, p=1, dklen=32))

    def cookie(self, key: str) -> str:
        """The cookie of a key, valid for LASTS_S."""
        signed = f"{int(time.time()) + LASTS_S}.{hash_key(key)}"
        return f"{signed}.{self._signature(signed)}"

    def key_hash(self, cookie: str) -> str | None:
        """The key's hash in a cookie; None for one that is not ours or has expired."""
        if len(cookie) > LONGEST_COOKIE or not cookie.isascii() or cookie.count(".") != 2:
            return None
        signed, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature, self._signature(signed)):
            return None
        expires, _, key_hash = signed.partition(".")
        return key_hash if int(expires) > time.time() else None

    def _signature(self, signed: str) -> str:
        return hmac.digest(self.secret, signed.encode(), "sha256").hex()
