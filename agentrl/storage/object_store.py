"""Objects by key below one URL, through fsspec. Every operation is repeated while the storage does not answer.

Imports fsspec and the client of the storage only when a store is opened.
"""

from __future__ import annotations

import errno
import time
from asyncio import TimeoutError as AsyncTimeoutError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import DamagedObject, StorageError, UserError

T = TypeVar("T")
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between the tries of an operation."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of this host's disk, which do not go away."""
FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object: its size, and a value that changes with its content (S3's ETag)."""

    size_bytes: int
    etag: str


class ObjectStore:
    """The objects below `url`. Keys are relative to it. All methods raise StorageError, which names the object."""

    def __init__(self, url: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        self._pause = pause
        self._files, self._root, self._faults = _opened(self.url)

    def write(self, key: str, data: bytes) -> None:
        """Write a small object, which readers see whole or not at all."""
        self._try("write", key, lambda path: self._files.pipe_file(path, data))

    def upload(self, source: Path, key: str) -> None:
        """Write a file."""
        self._try("write", key, lambda path: self._files.put_file(str(source), path))

    def read(self, key: str, at_most: int) -> bytes | None:
        """A small object; None when there is none. Raises DamagedObject when it is larger than `at_most` bytes."""
        facts = self.facts(key)
        if facts is not None and facts.size_bytes > at_most:
            raise DamagedObject(f"{self.url}/{key} has {facts.size_bytes} bytes; {at_most} are the most")
        return None if facts is None else self._try("read", key, lambda path: _bytes(self._files, path, at_most))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes `start` to `end` of an object; fewer when it is shorter."""

        def read(path: str) -> bytes:
            found: bytes = self._files.cat_file(path, start=start, end=end)
            return found

        return self._try("read", key, read)

    def download(self, key: str, target: Path) -> None:
        """Copy an object to a file."""
        self._try("read", key, lambda path: self._files.get_file(path, str(target)))

    def facts(self, key: str) -> ObjectFacts | None:
        """Size and ETag of an object; None when there is none."""
        info = self._try("read", key, lambda path: _info(self._files, path))
        if info is None or info.get("type") != "file":
            return None
        etag = info.get("ETag") or f"{info.get('mtime')}-{info.get('ino')}"
        return ObjectFacts(int(info["size"]), str(etag).strip('"'))

    def names(self, key: str) -> list[str]:
        """Names of the objects and folders directly below `key`, sorted."""
        found = self._try("list", key, lambda path: _listed(self._files, path))
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def delete(self, key: str) -> None:
        """Delete an object, or all objects below a key. It may be gone already."""
        self._try("delete", key, lambda path: _deleted(self._files, path))

    def _try(self, what: str, key: str, operation: Callable[[str], T]) -> T:
        """Do an operation, again after each of PAUSES_S while the storage does not answer."""
        path = f"{self._root}/{key}" if key else self._root
        for pause_s in (*PAUSES_S, None):
            try:
                return operation(path)
            except self._faults as error:
                if pause_s is None or _is_final(error):
                    said = " ".join(str(error).split()) or type(error).__name__
                    raise StorageError(f"cannot {what} {self.url}/{key}: {said}") from error
            self._pause(pause_s)
        raise AssertionError("unreachable")


def _is_final(error: Exception) -> bool:
    """Whether another try cannot help."""
    if isinstance(error, OSError):
        return isinstance(error, FOR_GOOD) or error.errno in OWN_DISK
    return type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")


def _opened(url: str) -> tuple[Any, str, tuple[type[Exception], ...]]:
    """The file system of a URL, the path of its root, and the errors of its operations. Raises UserError."""
    from fsspec.core import url_to_fs

    faults: tuple[type[Exception], ...] = (OSError, AsyncTimeoutError)
    if url.startswith("file:"):
        files, root = url_to_fs(url, auto_mkdir=True)
        return files, root, faults
    try:
        import s3fs  # noqa: F401 - fsspec opens it
        from aiohttp import ClientError as HTTPError
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise UserError(f"{url} needs s3fs: pip install 'agentrl[s3]'") from error
    config = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S, "retries": {"max_attempts": 0}}
    files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, config_kwargs=config)
    files.retries = 1  # tries of its own; ours count
    return files, root, (*faults, HTTPError, BotoCoreError, ClientError)


def _bytes(files: Any, path: str, at_most: int) -> bytes:
    found: bytes = files.cat_file(path, start=0, end=at_most)
    return found


def _info(files: Any, path: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = files.info(path)
    except FileNotFoundError:
        return None
    return found


def _listed(files: Any, path: str) -> list[str]:
    try:
        found: list[str] = files.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return [name for name in found if name.rstrip("/") != path.rstrip("/")]


def _deleted(files: Any, path: str) -> None:
    try:
        files.rm(path, recursive=True)
    except FileNotFoundError:
        return
