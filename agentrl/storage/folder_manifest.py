"""The files of a folder, with their sizes and SHA-256. Its digest names the folder's content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.errors import DamagedObject

MANIFEST = "MANIFEST.json"
FORMAT = 1
MANIFEST_BYTES = 64 << 20
"""Size of the largest manifest that is read."""
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's size and the SHA-256 of its bytes, in hexadecimal."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """The files of a folder, by their paths in it."""

    files: Mapping[str, FileFacts]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(facts.size_bytes for facts in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the list of files."""
        return hashlib.sha256(json.dumps(self._listed()).encode()).hexdigest()

    def dumps(self) -> bytes:
        """The manifest as an object, with its digest."""
        return json.dumps({"format": FORMAT, "digest": self.digest, "files": self._listed()}, indent=1).encode()

    def check(self, folder: Path) -> None:
        """Raise DamagedObject unless the folder has these files with these bytes."""
        for name in self.files:
            self.check_file(folder, name)

    def check_file(self, folder: Path, name: str) -> None:
        """Raise DamagedObject unless a file has its size and its bytes."""
        wanted = self.files[name]
        try:
            found = facts_of(folder / name)
        except OSError as error:
            raise DamagedObject(f"{folder / name} cannot be read: {error.strerror}") from error
        if found.size_bytes != wanted.size_bytes:
            raise DamagedObject(f"{name} has {found.size_bytes} bytes, not {wanted.size_bytes}")
        if found.sha256 != wanted.sha256:
            raise DamagedObject(f"{name} has the SHA-256 {found.sha256}, not {wanted.sha256}")

    def _listed(self) -> list[list[Any]]:
        return [[name, facts.size_bytes, facts.sha256] for name, facts in sorted(self.files.items())]


def manifest_of(folder: Path) -> FolderManifest:
    """The manifest of a folder's files, except of a manifest in it. Raises OSError."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    return FolderManifest({path.relative_to(folder).as_posix(): facts_of(path) for path in paths})


def read_manifest(data: bytes) -> FolderManifest:
    """A manifest of `dumps`. Raises DamagedObject, also for a path that leads out of the folder."""
    try:
        found = json.loads(data)
        manifest = FolderManifest({name: FileFacts(size, sha256) for name, size, sha256 in found["files"]})
        if found["format"] != FORMAT or found["digest"] != manifest.digest:
            raise ValueError("its digest is not that of its files")
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or name == MANIFEST:
                raise ValueError(f"{name!r} is not a file of the folder")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedObject(f"{MANIFEST} is damaged: {error}") from error
    return manifest


def facts_of(path: Path) -> FileFacts:
    """Size and SHA-256 of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(size, digest.hexdigest())
