"""Versions in a Mooncake store: the files of a version folder in chunks, `PREFIX/NAME/FILE/INDEX`.

    trainer's ranks ─► put their files ─► (all have) ─► rank 0 puts version.json, its first chunk last
    engine's host   ─► version.json ─► the chunks of the files that it needs

All chunks but a file's last have CHUNK_BYTES. The store is a cache beside the folder: it may evict any chunk, and the
reader then takes the next source. Digests of the manifest detect chunks of other bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.configs.publish_config import MooncakeAddress, MooncakeConfig
from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.transports.mooncake_store import MooncakeStore, RegisteredBuffer
from agentrl.versions.version_manifest import MANIFEST_BYTES, VERSION_FILE, VersionManifest, named_manifest

CHUNK_BYTES = 8 << 20
"""Size of an object: a part of a file. Writers and readers must agree on it."""


class MooncakeSpec(MooncakeAddress):
    """The versions below `prefix` in a Mooncake store."""

    kind: Literal["mooncake"] = "mooncake"
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,299}$")]


def mooncake_spec(config: MooncakeConfig | None, run: str) -> MooncakeSpec | None:
    """The versions of a run in its Mooncake store; None for a run without one."""
    if config is None:
        return None
    return MooncakeSpec(prefix=f"agentrl/{run}", **config.model_dump(exclude={"segment_gb"}))


class MooncakeSource:
    """Version files in a Mooncake store, which it connects to when it is first read."""

    def __init__(self, spec: MooncakeSpec, connect: Callable[[MooncakeAddress], MooncakeStore] = MooncakeStore) -> None:
        self._spec = spec
        self._connect = connect
        self._connecting = threading.Lock()
        self._connected: MooncakeStore | None = None

    def __str__(self) -> str:
        return f"mooncake://{self._spec.master}/{self._spec.prefix}"

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        data = bytearray()
        with RegisteredBuffer(self._store(), CHUNK_BYTES) as buffer:
            for index in range(MANIFEST_BYTES // CHUNK_BYTES):
                chunk = self._chunk(name, VERSION_FILE, index, buffer)
                if chunk is None and index == 0:
                    return None
                data += chunk or b""
                if chunk is None or len(chunk) < CHUNK_BYTES:
                    break
        return named_manifest(bytes(data), name, f"{self}/{name}")

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        if start >= end:
            return
        with RegisteredBuffer(self._store(), CHUNK_BYTES) as buffer:
            for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
                chunk = self._chunk(name, file, index, buffer)
                if chunk is None:
                    raise StorageError(f"{self}/{name}/{file} does not exist, or its part {index} was evicted")
                at = index * CHUNK_BYTES
                if len(chunk) < min(CHUNK_BYTES, end - at):
                    raise DamagedObject(f"{self}/{name}/{file} is truncated")
                yield chunk[max(start - at, 0) : end - at]

    def _chunk(self, name: str, file: str, index: int, buffer: RegisteredBuffer) -> bytes | None:
        """A part of a file; None when the store does not have it."""
        size = self._store().read_into(key(self._spec.prefix, name, file, index), buffer)
        return None if size is None else buffer.memory[:size].tobytes()

    def _store(self) -> MooncakeStore:
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect(self._spec)
            return self._connected


def put_files(store: MooncakeStore, prefix: str, folder: Path, files: Sequence[str]) -> int:
    """Put files of a version folder into a store; returns their bytes. Raises StorageError."""
    return sum(_put_file(store, prefix, folder, file) for file in files)


def put_manifest(store: MooncakeStore, prefix: str, folder: Path) -> None:
    """Complete a version whose files are all in the store. Raises StorageError."""
    _put_file(store, prefix, folder, VERSION_FILE)


def remove_version(store: MooncakeStore, prefix: str, name: str) -> None:
    """Remove a version's files. Raises StorageError."""
    store.remove(f"{prefix}/{name}/")


def key(prefix: str, name: str, file: str, index: int) -> str:
    """The key of a chunk."""
    return f"{prefix}/{name}/{file}/{index}"


def _put_file(store: MooncakeStore, prefix: str, folder: Path, file: str) -> int:
    """Put a file's chunks, the first one last: a reader that finds it finds all."""
    path = folder / file
    try:
        with path.open("rb") as opened:
            size = path.stat().st_size
            for index in reversed(range(-(-size // CHUNK_BYTES))):
                opened.seek(index * CHUNK_BYTES)
                chunk = opened.read(CHUNK_BYTES)
                store.put(key(prefix, folder.name, file, index), chunk)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return size
