"""Writes a delta file: the chunks of the tensors that changed, and an index of them at its end.

    MAGIC
    chunks of a tensor (delta_codec), one after another; of the next tensor; …
    index     JSON: [[NAME, TYPE, BYTES OF THE TENSOR, START OF ITS CHUNKS], …]
    TRAILER   bytes of the index (8, little-endian), MAGIC

A tensor that is equal to its parent's is left out. Several writers write different files of one delta; `joined` joins
their parts.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from agentrl.versions.delta_codec import Buffer, chunks_of, encode_chunk
from agentrl.versions.version_manifest import ITEM_BYTES, Delta, Size, VersionFile

MAGIC = b"ARLDELT1"
TRAILER = struct.Struct("<Q8s")
THREADS = min(4, os.cpu_count() or 1)


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of a delta file: its name, type and bytes, and where its chunks start in the file."""

    name: str
    dtype: str
    size_bytes: Size
    start: Size


class ChangedTensor(NamedTuple):
    """A tensor before and after: its bytes in the parent and in the new version, of equal length."""

    name: str
    dtype: str
    """Safetensors' name, such as `BF16`."""
    parent: Buffer
    new: Buffer


class DeltaPart(NamedTuple):
    """A written delta file. `changed` of `elements` elements differ."""

    file: VersionFile
    changed: int
    elements: int


class DeltaWriter:
    """Writes one delta file, tensor by tensor. A context manager; `part()` is valid after the block."""

    def __init__(self, path: Path, threads: int = THREADS) -> None:
        self._path = path
        self._threads = threads
        self._digest = hashlib.sha256()
        self._index: list[IndexEntry] = []
        self._size = self._changed = self._elements = 0

    def __enter__(self) -> Self:
        self._file: BinaryIO = self._path.open("xb")
        self._pool = ThreadPoolExecutor(self._threads)
        self._put(MAGIC)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        try:
            if error[0] is None:
                index = msgspec.json.encode(self._index)
                self._put(index + TRAILER.pack(len(index), MAGIC))
        finally:
            self._file.close()

    def add(self, tensor: ChangedTensor) -> int:
        """Write a tensor, unless it is equal to its parent's; returns the number of elements that differ.

        The buffers are no longer used when it returns. Raises ValueError for buffers of unequal length or an unknown
        type, OSError when the file cannot be written.
        """
        item_bytes = ITEM_BYTES.get(tensor.dtype)
        if item_bytes is None or len(tensor.parent) != len(tensor.new):
            raise ValueError(f"tensor {tensor.name!r} is no delta of its parent: its type or size differs")
        changed, start = 0, self._size
        same: list[bytes] = []  # chunks before the first that differs
        for chunk, differ in self._encoded(tensor, item_bytes):
            changed += differ
            same.append(chunk)
            if changed:
                self._put(b"".join(same))
                same.clear()
        if changed:
            self._index.append(IndexEntry(tensor.name, tensor.dtype, len(tensor.new), start))
        self._elements += len(tensor.new) // item_bytes
        self._changed += changed
        return changed

    def part(self) -> DeltaPart:
        """The facts of the file."""
        return DeltaPart(
            VersionFile(self._path.name, self._size, self._digest.hexdigest()), self._changed, self._elements
        )

    def _encoded(self, tensor: ChangedTensor, item_bytes: int) -> Iterator[tuple[bytes, int]]:
        """The tensor's chunks in order, encoded in threads, a few at a time."""
        parent, new = memoryview(tensor.parent).cast("B"), memoryview(tensor.new).cast("B")
        running: deque[Future[tuple[bytes, int]]] = deque()
        for part in chunks_of(len(new)):
            if len(running) > self._threads:
                yield running.popleft().result()
            running.append(self._pool.submit(encode_chunk, parent[part], new[part], item_bytes))
        while running:
            yield running.popleft().result()

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)


def write_delta(path: Path, tensors: Iterable[ChangedTensor]) -> DeltaPart:
    """Write a delta file from tensors that come one after another. Raises as `DeltaWriter.add` does."""
    with DeltaWriter(path) as writer:
        for tensor in tensors:
            writer.add(tensor)
    return writer.part()


def delta_name(index: int, count: int) -> str:
    """The name of file `index` (from 0) of `count` delta files."""
    return f"delta-{index + 1:05}-of-{count:05}.bin"


def joined(parent: str, parent_checksum: str, parts: Sequence[DeltaPart]) -> Delta:
    """One delta from the parts of its writers."""
    files = tuple(sorted((part.file for part in parts), key=lambda file: file.name))
    changed, elements = sum(part.changed for part in parts), sum(part.elements for part in parts)
    return Delta(parent, parent_checksum, files, changed, elements)
