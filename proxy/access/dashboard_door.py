"""Opens the dashboard for the proxy's keys: a run key shows its run, an admin key every run of the database."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.dashboard.sign_in import Viewer
from agentrl.domain.schemas import Power
from agentrl.errors import RequestError
from agentrl.proxy.access.authentication import Access


@dataclass(frozen=True, slots=True)
class KeyDoor:
    """The door of a proxy."""

    access: Access

    async def find(self, key_hash: str) -> Viewer:
        """The viewer with the key of this hash. Raises RequestError 401, and 403 for a session's key."""
        caller = await self.access.caller(key_hash)
        if caller.power is Power.SESSION:
            raise RequestError(403, "a session's key opens no pages: use a run key or an admin key", code="forbidden")
        return Viewer(None if caller.power is Power.ADMIN else self.access.store.run_id)
