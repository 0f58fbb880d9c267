"""A host's cache of versions: an engine fetches into it, and other hosts read from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from agentrl.configs.publish_config import StorageConfig
from agentrl.configs.section import Positive, Section
from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.control.preparation import Order
from agentrl.engine.prepared.preparer import Watch
from agentrl.storage.folder_cache import BYTES_OF_GB, default_folder
from agentrl.versions.read_tokens import is_read_token
from agentrl.versions.transports.memory_windows import WindowFiles, Windows
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_files import VersionFiles
from agentrl.versions.version_sources import SOURCE_SPECS, open_source

VERSION_CACHE = "AGENTRL_VERSION_CACHE"
"""Variable with a `CacheSpec` as JSON, for the process of SGLang's server."""


class CacheSpec(Section):
    """A host's cache of versions."""

    root: Path
    limit_bytes: Positive

    def open(self) -> VersionCache:
        """The cache."""
        return VersionCache(self.root, self.limit_bytes)


def cache_spec(config: StorageConfig) -> CacheSpec:
    """The cache of versions, a folder beside `storage.cache_dir` of the same limit."""
    beside = (config.cache_dir or default_folder()).expanduser()
    return CacheSpec(root=beside.with_name(f"{beside.name}-versions"), limit_bytes=int(config.cache_gb * BYTES_OF_GB))


def version_cache(text: str | None) -> VersionCache:
    """The cache that the variable describes; without it that of the default settings. Raises ValueError."""
    try:
        return (CacheSpec.model_validate_json(text) if text else cache_spec(StorageConfig())).open()
    except ValidationError as error:
        raise ValueError(f"{VERSION_CACHE}: {error}") from None


class VersionHost:
    """The versions of one host, for an engine with this `key`; None: an engine on loopback without a key.

    A version that does not pass the `checks` is not prepared.
    """

    def __init__(self, cache: VersionCache, key: str | None, checks: LoadChecks | None = None) -> None:
        self._cache = cache
        self._key = key
        self._checks = checks
        self.files = WindowFiles(VersionFiles([cache], self._may_read), Windows())

    @contextmanager
    def fetch(self, order: Order, watch: Watch) -> Iterator[Path]:
        """Hold a version's whole files, verified. Raises StorageError, UserError, and what `watch` raises."""
        sources = [open_source(spec) for spec in SOURCE_SPECS.validate_python(order.sources)]
        with self._cache.whole(order.name, sources, order.checksum, watch) as folder:
            if self._checks is not None:
                self._checks.checkpoint(folder)
            yield folder

    def _may_read(self, token: str, name: str) -> bool:
        return self._key is None or is_read_token(token, self._key, name, time.time())
