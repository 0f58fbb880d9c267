"""Checks a weight folder before an engine loads it: the trainer's checksum, and whether it fits the base model.

A version that was written as a delta is made whole first, in this host's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.errors import ModelFolderError, StorageError, StoreError
from agentrl.models import has_weights
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.versions.version_manifest import VERSION_FILE
from agentrl.versions.weights_folder import ADAPTER, TENSORS, checksum

Signature = tuple[str, int, int]
HELD = 2
"""Versions whose whole files stay in the cache while engines load them."""


class WeightFolders:
    """Checks each folder once in this process, and again when its file `tensors` has changed.

    With `places`, folders with a manifest are found there, and made whole. With `fits`, the folders are whole weights
    or adapters for this base model.
    """

    def __init__(
        self, tensors: str = TENSORS, places: VersionPlaces | None = None, fits: LoadChecks | None = None
    ) -> None:
        self._tensors = tensors
        self._places = places
        self._check = None if fits is None else fits.adapter if tensors == ADAPTER else fits.checkpoint
        self._fitting: dict[int, tuple[str, int]] = {}  # version → folder, and when its list of files changed
        self._checksums: dict[int, tuple[Signature, str]] = {}
        self._held: dict[str, ExitStack] = {}
        self._making = asyncio.Lock()

    async def checked(self, version: int, path: str, expected: str | None) -> str:
        """A folder with whole tensors: `path`, if it has them.

        A file that this machine does not see passes: engines may share a disk with the trainer, and an engine that
        cannot read the file reports that. Raises StoreError when its tensors have another checksum than `expected`, it
        cannot be made whole, or the base model has other tensors.
        """
        found = await self._recorded(version, path, expected)
        if self._check is not None:
            await asyncio.to_thread(self._fit, version, Path(found), self._check)
        return found

    def _fit(self, version: int, folder: Path, check: Callable[[Path], None]) -> None:
        """Check a folder that this machine sees. Raises StoreError."""
        try:
            signature = (str(folder), folder.stat().st_mtime_ns)
        except OSError:
            return
        if self._fitting.get(version) == signature or not has_weights(folder):
            return
        try:
            check(folder)
        except ModelFolderError as error:
            raise StoreError(f"version {version} is not loaded: it does not fit the base model: {error}") from error
        self._fitting[version] = signature

    async def _recorded(self, version: int, path: str, expected: str | None) -> str:
        """The folder with the whole tensors that were recorded. Raises StoreError."""
        folder = Path(path)
        if expected is not None and self._places is not None and await asyncio.to_thread(self._has_manifest, folder):
            return await self._whole(self._places, version, folder, expected)
        file = folder / self._tensors
        try:
            stat = file.stat()
            signature = (path, stat.st_mtime_ns, stat.st_size)
            known = self._checksums.get(version)
            if known is None or known[0] != signature:
                known = (signature, await asyncio.to_thread(_checksum, file))
                self._checksums[version] = known
        except OSError:
            return path
        if expected is not None and known[1] != expected:
            raise _other_tensors(
                version,
                f"the tensors in {file} are not those that the trainer recorded "
                f"(checksum {known[1][:12]}, recorded {expected[:12]})",
            )
        return path

    def _has_manifest(self, folder: Path) -> bool:
        """Whether this host has the version's `version.json`."""
        assert self._places is not None
        return any((root / folder.name / VERSION_FILE).is_file() for root in (folder.parent, self._places.weights))

    async def _whole(self, places: VersionPlaces, version: int, folder: Path, expected: str) -> str:
        """A folder with a version's whole files, which stays until two later versions were asked for."""
        async with self._making:
            stack = ExitStack()
            entry = places.cache.whole(folder.name, places.own_sources(folder), expected)
            try:
                path = await asyncio.to_thread(stack.enter_context, entry)
            except StorageError as error:
                raise _other_tensors(version, str(error)) from error
            before = self._held.pop(folder.name, None)
            self._held[folder.name] = stack
            stale = [self._held.pop(name) for name in list(self._held)[:-HELD]]
        for each in [before, *stale]:
            if each is not None:
                each.close()
        return str(path)


def _other_tensors(version: int, why: str) -> StoreError:
    return StoreError(
        f"version {version} is not loaded: {why}; restart the trainer, which writes the folder of its newest "
        "checkpoint again"
    )


def _checksum(file: Path) -> str:
    """The checksum of a file; for a damaged file one that no tensors have."""
    try:
        return checksum(file)
    except ValueError:
        return "damaged"
