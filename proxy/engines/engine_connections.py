"""Makes the client of an engine: by its backend, with its key."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from agentrl.configs.engine_addresses import BackendName, engine_address
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_keys import EngineKeys
from agentrl.store.engine_rows import Member


@dataclass(frozen=True, slots=True)
class EngineConnections:
    """Connects to the engines of a run. `http` belongs to the caller."""

    http: aiohttp.ClientSession
    keys: EngineKeys = field(repr=False)
    backend: BackendName  # of an engine that names none

    def listed(self, address: str) -> EngineClient:
        """The client of an engine of the proxy's start."""
        url, backend = engine_address(address)
        return self._connect(url, backend, self.keys.of(url))

    def joined(self, member: Member) -> EngineClient:
        """The client of an engine that joined."""
        key = self.keys.own(member.url) if member.own_key else self.keys.of(member.url)
        return self._connect(member.url, member.backend, key)

    def _connect(self, url: str, backend: str | None, key: str | None) -> EngineClient:
        return BACKENDS[backend or self.backend].client(url, self.http, key=key)
