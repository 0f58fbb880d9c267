"""Copies of the run's versions in a Mooncake store (`publish.mooncake`): every rank puts its share of the files.

    ranks: connect, once ─► put their files ─► (none failed) ─► rank 0: put version.json ─► engines' hosts may read

The store is a cache: a version that cannot be put is read elsewhere, and the next one is tried again. A store that does
not answer costs a rank minutes, so it waits RETRY_S before it connects again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from agentrl.configs.publish_config import MooncakeAddress, MooncakeConfig
from agentrl.errors import StorageError
from agentrl.trainer.distributed import World
from agentrl.versions.transports import mooncake_source
from agentrl.versions.transports.mooncake_source import mooncake_spec
from agentrl.versions.transports.mooncake_store import MooncakeStore
from agentrl.versions.version_manifest import manifest_in

RETRY_S = 600.0
BYTES_OF_GB = 10**9
Connect = Callable[[MooncakeAddress, int], MooncakeStore]


class MooncakeCopy:
    """The versions of one run in its Mooncake store. Does nothing for a run without one."""

    def __init__(
        self,
        config: MooncakeConfig | None,
        run: str,
        world: World,
        connect: Connect = MooncakeStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec = mooncake_spec(config, run)
        self._segment_bytes = 0 if config is None else int(config.segment_gb * BYTES_OF_GB)
        self._world = world
        self._connect = connect
        self._clock = clock
        self._store: MooncakeStore | None = None
        self._connects_at = 0.0
        self._put: set[str] = set()

    def put(self, folder: Path) -> str:
        """Put a version's folder into the store; returns why that failed, else "". Collective."""
        if self._spec is None:
            return ""
        said = [one for one in self._world.everyones(self._put_share(folder)) if one]
        return said[0] if said else self._world.from_leader(partial(self._complete, folder))

    def remove(self, unneeded: Callable[[list[str]], Collection[str]]) -> None:
        """Remove the versions that this process put and that `unneeded` selects. Rank 0 only."""
        if self._spec is None or self._store is None:
            return
        for name in unneeded(sorted(self._put)):
            self._put.discard(name)
            try:
                mooncake_source.remove_version(self._store, self._spec.prefix, name)
            except StorageError:
                return  # the store evicts them

    def _put_share(self, folder: Path) -> str:
        assert self._spec is not None
        manifest = manifest_in(folder)
        if manifest is None:
            return f"{folder} has no manifest"
        share = sorted(manifest.files)[self._world.rank :: self._world.size]
        try:
            mooncake_source.put_files(self._connected(), self._spec.prefix, folder, share)
        except StorageError as error:
            return str(error)
        return ""

    def _complete(self, folder: Path) -> str:
        assert self._spec is not None
        try:
            mooncake_source.put_manifest(self._connected(), self._spec.prefix, folder)
        except StorageError as error:
            return str(error)
        self._put.add(folder.name)
        return ""

    def _connected(self) -> MooncakeStore:
        assert self._spec is not None
        if self._store is None:
            if self._clock() < self._connects_at:
                raise StorageError("the Mooncake store did not answer some minutes ago")
            try:
                self._store = self._connect(self._spec, self._segment_bytes)
            except StorageError:
                self._connects_at = self._clock() + RETRY_S
                raise
        return self._store
