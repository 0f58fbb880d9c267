"""Connects to the engines of a run: each by its backend, with its key."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from agentrl.configs.engine_config import BackendName, engine_address
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_keys import EngineKeys


@dataclass(frozen=True, slots=True)
class EngineConnections:
    """Makes the clients of a run's engines. `http` belongs to the caller."""

    http: aiohttp.ClientSession
    keys: EngineKeys = field(repr=False)
    backend: BackendName  # of an engine that names none

    def listed(self, address: str) -> EngineClient:
        """The client of an engine whose address was given."""
        url, backend = engine_address(address)
        return self._connect(url, backend, self.keys.of(url))

    def joined(self, url: str, backend: str | None, *, own_key: bool) -> EngineClient:
        """The client of an engine that joined, perhaps with a key of its own."""
        return self._connect(url, backend, self.keys.own(url) if own_key else self.keys.of(url))

    def _connect(self, url: str, backend: str | None, key: str | None) -> EngineClient:
        return BACKENDS[backend or self.backend].client(url, self.http, key=key)
