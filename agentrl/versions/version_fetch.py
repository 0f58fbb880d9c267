"""Reads manifests and files of versions from several sources. When one fails, the next is tried."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.tensor_files import in_threads
from agentrl.versions.version_manifest import VersionFile, VersionManifest
from agentrl.versions.version_sources import FolderSource, Source

PARALLEL_FILES = 4
"""Files that are read at once."""


class _Ended(Exception):
    """A file is no longer needed, because another one failed."""


class Fetcher:
    """The sources of one version and its ancestors, in the order in which they are tried.

    `received` is called with the bytes of each piece that is read, by any thread; what it raises ends the work.
    """

    def __init__(self, sources: Sequence[Source], received: Callable[[int], None]) -> None:
        self._sources = sources
        self.received = received
        self._faults = [0] * len(sources)
        self._found: dict[str, VersionManifest | None] = {}
        self._failures: list[str] = []

    def manifest(self, name: str, checksum: str | None = None) -> VersionManifest | None:
        """The manifest of a version, joined from the sources; None when none has it (with this checksum, if given).

        One source may have its whole files and another its delta: the manifest names both.
        """
        if name not in self._found:
            self._found[name] = self._joined(name, checksum)
        return self._found[name]

    def in_place(self, name: str) -> list[Path]:
        """The folders of this host where a version may be used in place."""
        return [source.root / name for source in self._sources if isinstance(source, FolderSource) and source.in_place]

    def required(self, name: str, checksum: str) -> VersionManifest:
        """`manifest`. Raises StorageError, which says what each source answered, when none has it."""
        manifest = self.manifest(name, checksum)
        if manifest is None:
            raise StorageError(f"no source has {name} with the checksum {checksum[:12]}{self.said()}")
        return manifest

    def said(self) -> str:
        """The failures so far, for the end of a message."""
        return f": {'; '.join(self._failures[-5:])}" if self._failures else ""

    def fill(self, name: str, files: Sequence[VersionFile], target: Path) -> None:
        """Read files of a version into a folder and compare them. Raises StorageError, and OSError of this disk."""
        failed: list[BaseException] = []

        def read(file: VersionFile) -> None:
            try:
                self._file(name, file, target / file.name, failed)
            except BaseException as error:
                failed.append(error)
                raise

        try:
            in_threads(read, files, PARALLEL_FILES)
        except _Ended:
            raise failed[0] from None

    def _joined(self, name: str, checksum: str | None) -> VersionManifest | None:
        joined: VersionManifest | None = None
        for index in self._in_order():
            found = self._asked(index, name)
            if found is None or (checksum or found.checksum) != found.checksum:
                continue
            if joined is None:
                joined, checksum = found, found.checksum
            joined = msgspec.structs.replace(
                joined, whole=joined.whole or found.whole, delta=joined.delta or found.delta
            )
            if joined.whole is not None and joined.delta is not None:
                break
        return joined

    def _in_order(self) -> list[int]:
        """The sources, those that failed least often first."""
        return sorted(range(len(self._sources)), key=lambda index: self._faults[index])

    def _failed(self, index: int, error: StorageError) -> None:
        self._failures.append(str(error))
        self._faults[index] += 1

    def _asked(self, index: int, name: str) -> VersionManifest | None:
        try:
            return self._sources[index].manifest(name)
        except StorageError as error:
            self._failed(index, error)
            return None

    def _file(self, name: str, file: VersionFile, target: Path, failed: Sequence[BaseException]) -> None:
        for index in self._in_order():
            try:
                self._copy(self._sources[index], name, file, target, failed)
            except StorageError as error:
                self._failed(index, error)
            else:
                return
        raise StorageError(f"no source has {name}/{file.name} as its manifest has it{self.said()}")

    def _copy(
        self, source: Source, name: str, file: VersionFile, target: Path, failed: Sequence[BaseException]
    ) -> None:
        """Copy a file from a source; it has its name once it is verified.

        Raises StorageError of the source, OSError of this disk, and _Ended when another file has `failed`.
        """
        digest, size, draft = hashlib.sha256(), 0, target.with_name(f".{target.name}")
        with draft.open("wb") as out:
            for piece in source.read(name, file.name, 0, file.size_bytes):
                if failed:
                    raise _Ended
                size += len(piece)
                if size > file.size_bytes:
                    raise DamagedObject(f"{source}/{name}/{file.name} has more than {file.size_bytes} bytes")
                digest.update(piece)
                out.write(piece)
                self.received(len(piece))
        if (size, digest.hexdigest()) != (file.size_bytes, file.sha256):
            raise DamagedObject(f"{source}/{name}/{file.name} has other bytes than its manifest states")
        draft.rename(target)
