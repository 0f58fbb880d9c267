"""A host's cache of versions: an engine fetches into it, and other hosts read from it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

from agentrl.engine.control.preparation import Order
from agentrl.engine.prepared.preparer import Watch
from agentrl.versions.read_tokens import is_read_token
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_files import VersionFiles
from agentrl.versions.version_sources import SOURCE_SPECS, open_source


class VersionHost:
    """The versions of one host, for an engine with this `key`; None: an engine on loopback without a key."""

    def __init__(self, cache: VersionCache, key: str | None) -> None:
        self._cache = cache
        self._key = key
        self.files = VersionFiles([cache], self._may_read)

    def fetch(self, order: Order, watch: Watch) -> AbstractContextManager[Path]:
        """Hold a version's whole files, verified. Raises StorageError, UserError, and what `watch` raises."""
        sources = [open_source(spec) for spec in SOURCE_SPECS.validate_python(order.sources)]
        return self._cache.whole(order.name, sources, order.checksum, watch)

    def _may_read(self, token: str, name: str) -> bool:
        return self._key is None or is_read_token(token, self._key, name, time.time())
