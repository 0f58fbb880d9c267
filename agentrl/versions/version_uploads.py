"""Receives version folders over a network, piece by piece; a folder appears when it is complete.

    ABSENT ── write ──► DRAFT ── write … ──► DRAFT ── complete: every file has the digest of `version.json` ──► PRESENT
                          ▲                    │
                          └─ a damaged file is removed, and sent again

A draft is a hidden folder, and a piece is only ever appended, so an upload that was interrupted goes on where it
stopped, after a restart too. Several processes of one host may receive pieces of one version.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import DamagedObject, StorageError
from agentrl.files import settle
from agentrl.storage.folder_manifest import facts_of
from agentrl.versions.tensor_header import MOST_BYTES
from agentrl.versions.version_manifest import (
    FILE_NAME,
    VERSION_FILE,
    VersionManifest,
    named_manifest,
    read_manifest,
    require_name,
)
from agentrl.versions.version_removal import remove, version_names
from agentrl.versions.weights_folder import version_of

DRAFT = ".upload"
LOCK = ".uploads.lock"


class Gap(StorageError):
    """A piece does not begin where the draft of its file ends; `received` bytes are there."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received


class Uploads:
    """Version folders that are received below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def received(self, name: str, file: str) -> int:
        """Bytes of a file that the draft of a version has. Raises ValueError for an invalid name."""
        try:
            return self._draft_file(name, file).stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, name: str, file: str, start: int, data: bytes) -> int:
        """Append a piece to a file of a draft; returns the bytes that are there then.

        Raises ValueError for an invalid name, Gap for a piece that does not begin at the end of the file, StorageError
        when it cannot be written: the file is then as before.
        """
        path = self._draft_file(name, file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with open(descriptor, "ab", buffering=0) as opened:
                fcntl.flock(opened, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                if size != start or start + len(data) > MOST_BYTES:
                    raise Gap(f"{file} of {name} has {size} bytes here: the next piece begins there", size)
                _append(opened.fileno(), data, size)
                return size + len(data)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def complete(self, name: str, manifest: bytes) -> VersionManifest:
        """Let a version appear, with its `version.json`; older drafts are removed.

        Repeating it is harmless. Raises ValueError for an invalid name, DamagedObject for a manifest that is none, and
        for a file that is missing or has another digest: a damaged one is removed, so that it can be sent again.
        """
        require_name(name)
        found, target = named_manifest(manifest, name, "upload"), self._root / name
        try:
            with self._locked():
                if _manifest_in(target) != found:
                    draft = self._draft(name)
                    _check(draft, found)
                    (draft / VERSION_FILE).write_bytes(found.dumps())
                    settle(draft, target)
                self._remove_drafts(found.version)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
        return found

    def names(self) -> list[str]:
        """The versions that are complete here."""
        return version_names(self._root)

    def remove(self, unneeded: set[str], drafts_until: int = -1) -> None:
        """Delete versions by name, except ancestors of the others, and the drafts of versions up to `drafts_until`.

        Raises StorageError.
        """
        try:
            with self._locked():
                self._remove_drafts(drafts_until)
                remove(self._root, lambda names: unneeded.intersection(names))
        except OSError as error:
            raise StorageError(f"{self._root} cannot be cleaned: {error.strerror or error}") from error

    def _draft(self, name: str) -> Path:
        return self._root / f".{name}{DRAFT}"

    def _draft_file(self, name: str, file: str) -> Path:
        require_name(name)
        if not FILE_NAME.fullmatch(file) or file == VERSION_FILE:
            raise ValueError(f"{file[:200]!r} is not a file of a version folder")
        return self._draft(name) / file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process completes a version at a time."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_drafts(self, newest: int) -> None:
        """Remove the drafts of versions up to `newest`: their uploads were given up."""
        for draft in self._root.glob(f".v*{DRAFT}"):
            version = version_of(draft.name[1 : -len(DRAFT)])
            if version is not None and version <= newest:
                shutil.rmtree(draft, ignore_errors=True)


def _append(descriptor: int, data: bytes, size: int) -> None:
    """Append all of `data`, or nothing. Raises OSError."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _check(draft: Path, manifest: VersionManifest) -> None:
    """Raise DamagedObject unless a draft has the files of a manifest; others are removed."""
    for file in manifest.files.values():
        path = draft / file.name
        try:
            facts = facts_of(path)
        except FileNotFoundError:
            raise DamagedObject(f"{file.name} of {manifest.name} was not sent") from None
        if facts.size_bytes < file.size_bytes:
            raise DamagedObject(f"{file.name} of {manifest.name} has {facts.size_bytes} of {file.size_bytes} bytes")
        if (facts.size_bytes, facts.sha256) != (file.size_bytes, file.sha256):
            path.unlink()
            raise DamagedObject(f"{file.name} of {manifest.name} was damaged on its way: send it again")
    for path in draft.iterdir():
        if path.name not in manifest.files:
            path.unlink()


def _manifest_in(folder: Path) -> VersionManifest | None:
    """The manifest of a folder that is there; None when there is none, or another format's."""
    try:
        return read_manifest((folder / VERSION_FILE).read_bytes())
    except (FileNotFoundError, DamagedObject):
        return None
