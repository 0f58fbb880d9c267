"""The entries of the cache of versions, and folders of versions that are used in place: their manifests and stamps."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentrl.errors import DamagedObject
from agentrl.storage.folder_cache import FolderCache
from agentrl.storage.folder_manifest import FileFacts, facts_of
from agentrl.versions.tensor_files import verify
from agentrl.versions.version_fetch import Fetcher
from agentrl.versions.version_manifest import VERSION_FILE, VersionManifest, named_manifest
from agentrl.versions.version_relay import DELTA, MADE, WHOLE
from agentrl.versions.version_stamps import STAMP, is_stamped, stamp_of, write_stamp

IN_PLACE = "in-place"
MOST_STAMPS = 64
"""Stamps of folders in place that are kept."""


def announce(draft: Path, manifest: VersionManifest) -> None:
    """Say in a draft which files will come. Raises OSError."""
    (draft / VERSION_FILE).write_bytes(manifest.dumps())


def seal(draft: Path, manifest: VersionManifest) -> None:
    """Complete an entry whose files are verified. Raises OSError."""
    announce(draft, manifest)
    write_stamp(draft / STAMP, stamp_of(draft, _names(draft)))


def is_sound(folder: Path) -> bool:
    """Whether an entry has its bytes. It is hashed when its stamp is not that of its files."""
    try:
        stamp = stamp_of(folder, _names(folder))
        if is_stamped(folder / STAMP, stamp):
            return True
        manifest = manifest_in(folder)
        if folder.suffix != DELTA:
            verify(folder, manifest)
        elif manifest.delta is None or any(
            facts_of(folder / file.name) != FileFacts(file.size_bytes, file.sha256) for file in manifest.delta.files
        ):
            return False
        write_stamp(folder / STAMP, stamp)
    except (OSError, DamagedObject):
        return False
    return True


def manifest_in(folder: Path) -> VersionManifest:
    """The manifest of an entry. Raises OSError and DamagedObject."""
    return named_manifest((folder / VERSION_FILE).read_bytes(), folder.stem, str(folder))


def own_manifest(root: Path, name: str, checksum: str) -> VersionManifest | None:
    """The manifest of a version whose whole files the cache has."""
    for kind in (WHOLE, MADE):
        try:
            found = manifest_in(root / f"{name}{kind}")
        except (OSError, DamagedObject):
            continue
        if found.checksum == checksum:
            return found
    return None


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's files. Raises OSError."""
    return sum((folder / name).stat().st_size for name in _names(folder))


class InPlace:
    """Folders with whole files that are used where they are. Each is hashed once for all processes of the host."""

    def __init__(self, root: Path, entries: FolderCache) -> None:
        self._root = root
        self._entries = entries

    def verified(self, wanted: VersionManifest, fetcher: Fetcher) -> Path | None:
        """A folder with the verified whole files of a version. Raises StorageError when the cache cannot be written."""
        folders = fetcher.in_place(wanted.name) if wanted.whole is not None else []
        return next((folder for folder in folders if self._is_verified(folder, wanted)), None)

    def _is_verified(self, folder: Path, wanted: VersionManifest) -> bool:
        names = [file.name for file in wanted.whole or ()]
        where = hashlib.sha256(f"{folder.absolute()} {wanted.checksum}".encode()).hexdigest()[:32]
        path = self._root / f"{IN_PLACE}-{where}{STAMP}"
        try:
            if is_stamped(path, stamp_of(folder, names)):
                return True
            with self._entries.alone(IN_PLACE):
                stamp = stamp_of(folder, names)
                if not is_stamped(path, stamp):
                    verify(folder, wanted)
                    write_stamp(path, stamp)
                    self._prune()
        except (OSError, DamagedObject):
            return False
        return True

    def _prune(self) -> None:
        """Delete the stamps of old folders."""
        stamps = sorted(self._root.glob(f"{IN_PLACE}-*{STAMP}"), key=lambda path: path.stat().st_mtime)
        for path in stamps[:-MOST_STAMPS]:
            path.unlink()


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]
