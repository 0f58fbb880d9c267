"""Folders on this host's disk that were copied from object storage. Several processes share them.

    ABSENT ── filled in a draft, renamed ──► READY ── held by readers (a shared lock each) ──► READY
       ▲                                       │
       └──────── evicted or damaged ◄──────────┘   only while no reader holds it

`NAME/` is an entry, with its manifest. `NAME.lock` is locked exclusively by who fills or deletes the entry, shared by
who reads it; the operating system releases locks when a process ends. A second process that wants an entry waits until
the first has filled it. One entry is filled at a time. Before that, the entries that were not used for the longest time
are deleted until the cache, and its disk, have room.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import CacheError, DamagedObject
from agentrl.files import atomic_folder, remove_drafts
from agentrl.storage.folder_manifest import MANIFEST, read_manifest

LOCK = ".lock"
WRITING = "writing.lock"
"""Locked by the process that fills an entry."""
BYTES_OF_GB = 10**9


class FolderCache:
    """A folder of entries with at most `limit_bytes`."""

    def __init__(
        self,
        root: Path | None,
        limit_bytes: int,
        *,
        is_sound: Callable[[Path], bool] | None = None,
        durable: bool = True,
    ) -> None:
        """`is_sound(folder)` says whether an entry has its bytes; by default its files are compared with its manifest.

        Without `durable`, entries are not synced, so `is_sound` must detect one that a power failure left incomplete.
        """
        self._root = (root or default_folder()).expanduser()
        self._limit_bytes = limit_bytes
        self._is_sound = is_sound or _has_manifest_bytes
        self._durable = durable

    @contextmanager
    def entry(self, name: str, size_bytes: int, fill: Callable[[Path], None]) -> Iterator[Path]:
        """Yield the entry `name`, which `fill` writes, with its manifest, when it is absent or damaged.

        It is not deleted until the block ends. Raises CacheError when it cannot be written, and what `fill` raises.
        """
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._held(name, size_bytes, fill)
        except OSError as error:
            raise CacheError(f"cache {self._root}: {error.strerror or error}") from error
        try:
            yield self._root / name
        finally:
            os.close(lock)

    @contextmanager
    def present(self, name: str) -> Iterator[Path | None]:
        """Yield the entry `name`, which is not deleted until the block ends; None when it is absent or damaged.

        Raises CacheError when the cache cannot be read.
        """
        try:
            lock = self._held_if_sound(name) if (self._root / name).exists() else None
        except OSError as error:
            raise CacheError(f"cache {self._root}: {error.strerror or error}") from error
        try:
            yield None if lock is None else self._root / name
        finally:
            if lock is not None:
                os.close(lock)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other processes out of blocks of the same name. Raises CacheError when the lock cannot be taken."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._locked(self._root / f"{name}{LOCK}", fcntl.LOCK_EX)
        except OSError as error:
            raise CacheError(f"cache {self._root}: {error.strerror or error}") from error
        try:
            yield
        finally:
            os.close(lock)

    def discard(self, name: str) -> None:
        """Delete an entry, unless a process holds it. Raises CacheError when it cannot be deleted."""
        try:
            if (self._root / name).exists():
                self._delete(self._root / name)
        except OSError as error:
            raise CacheError(f"cache {self._root}: {error.strerror or error}") from error

    def _held_if_sound(self, name: str) -> int | None:
        """The descriptor of the shared lock of an entry; None when the entry is absent or damaged."""
        folder, path = self._root / name, self._root / f"{name}{LOCK}"
        lock = self._locked(path, fcntl.LOCK_SH)
        try:
            if self._is_sound(folder):
                os.utime(folder)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def _held(self, name: str, size_bytes: int, fill: Callable[[Path], None]) -> int:
        """Fill the entry if needed; returns the descriptor of its shared lock. Raises OSError and CacheError."""
        folder, path = self._root / name, self._root / f"{name}{LOCK}"
        while True:
            if folder.exists() and (held := self._held_if_sound(name)) is not None:
                return held
            lock = self._locked(path, fcntl.LOCK_EX)
            try:
                if not self._is_sound(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    self._fill(folder, size_bytes, fill)
                os.utime(folder)
                fcntl.flock(lock, fcntl.LOCK_SH)  # another process may lock it in between
                if folder.exists() and _is_lock_of(lock, path):
                    return lock
            except BaseException:
                if not folder.exists():
                    path.unlink(missing_ok=True)
                os.close(lock)
                raise
            os.close(lock)

    def _fill(self, folder: Path, size_bytes: int, fill: Callable[[Path], None]) -> None:
        """Make room for an entry and write it. One process of the host does this at a time."""
        writing = self._locked(self._root / WRITING, fcntl.LOCK_EX)
        try:
            remove_drafts(self._root)
            self._make_room(size_bytes)
            with atomic_folder(folder, self._durable) as draft:
                fill(draft)
        finally:
            os.close(writing)

    def _locked(self, path: Path, how: int) -> int:
        """Lock a file, which is created if needed; returns the descriptor. Raises BlockingIOError with LOCK_NB."""
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, how)
            except BaseException:
                os.close(lock)
                raise
            if _is_lock_of(lock, path):
                return lock
            os.close(lock)  # its entry was deleted meanwhile

    def _make_room(self, size_bytes: int) -> None:
        """Delete entries without readers until the cache, and its disk, have room.

        Raises CacheError when too many are held.
        """
        if size_bytes > self._limit_bytes:
            raise CacheError(
                f"cache {self._root}: {size_bytes} bytes are more than it may hold "
                f"({self._limit_bytes}; storage.cache_gb)"
            )
        sizes = {path: _size(path) for path in self._root.iterdir() if path.is_dir()}
        used = sum(sizes.values())
        missing = size_bytes - shutil.disk_usage(self._root).free
        if missing > used:  # other files fill the disk: to delete entries would not help
            missing = 0
        for path in sorted(sizes, key=_used_at):
            if used + size_bytes <= self._limit_bytes and missing <= 0:
                return
            if self._delete(path):
                used -= sizes[path]
                missing -= sizes[path]
        if used + size_bytes > self._limit_bytes:
            raise CacheError(
                f"cache {self._root}: no room for {size_bytes} bytes beside the {used} in use "
                f"(at most {self._limit_bytes}; storage.cache_gb)"
            )

    def _delete(self, folder: Path) -> bool:
        """Delete an entry, unless a process holds it."""
        path = folder.with_name(f"{folder.name}{LOCK}")
        try:
            lock = self._locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            if folder.exists():  # another process may have deleted it before the lock was ours
                shutil.rmtree(folder)
            path.unlink()
        finally:
            os.close(lock)
        return True


def default_folder() -> Path:
    """`$AGENTRL_CACHE/storage`, by default `~/.cache/agentrl/storage`."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl") / "storage"


def _has_manifest_bytes(folder: Path) -> bool:
    """Whether an entry has the bytes of its manifest."""
    try:
        read_manifest((folder / MANIFEST).read_bytes()).check(folder)
    except (OSError, DamagedObject):
        return False
    return True


def _is_lock_of(lock: int, path: Path) -> bool:
    """Whether a descriptor is of the file that is at `path` now."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(lock)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _size(folder: Path) -> int:
    """Bytes of an entry's files, without those that another process deletes meanwhile."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(root, name)).st_size
    return size


def _used_at(folder: Path) -> float:
    """When an entry was used; 0 for one that another process has deleted."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
