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
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from agentrl.versions.delta_codec import CHUNK_BYTES, Buffer, chunks_of, encode_chunk
from agentrl.versions.tensor_header import ITEM_BYTES
from agentrl.versions.version_manifest import Delta, Size, VersionFile

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


@dataclass(slots=True)
class _Tensor:
    """The tensor that is being written. It holds the bytes of an incomplete chunk, before and after."""

    entry: IndexEntry
    item_bytes: int
    seen: int = 0
    changed: int = 0
    same: list[bytes] = field(default_factory=list)  # chunks before the first that differs
    held_parent: bytearray = field(default_factory=bytearray)
    held_new: bytearray = field(default_factory=bytearray)

    def hold(self, parent: Buffer, new: Buffer) -> None:
        self.held_parent += parent
        self.held_new += new

    def released(self) -> tuple[Buffer, Buffer]:
        pair = self.held_parent, self.held_new
        self.held_parent, self.held_new = bytearray(), bytearray()
        return pair


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
        self.begin(tensor.name, tensor.dtype, len(tensor.new))
        self.extend(tensor.parent, tensor.new)
        return self.end()

    def begin(self, name: str, dtype: str, size_bytes: int) -> None:
        """Begin a tensor that comes in parts, by `extend`. Raises ValueError for an unknown type."""
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None or size_bytes % item_bytes:
            raise ValueError(f"tensor {name!r} is no delta of its parent: {size_bytes} bytes of type {dtype[:40]!r}")
        self._tensor = _Tensor(IndexEntry(name, dtype, size_bytes, self._size), item_bytes)

    def extend(self, parent: Buffer, new: Buffer) -> None:
        """Add the tensor's next bytes, before and after. Raises as `add` does."""
        tensor = self._tensor
        before, after = memoryview(parent).cast("B"), memoryview(new).cast("B")
        tensor.seen += len(after)
        if len(before) != len(after) or tensor.seen > tensor.entry.size_bytes:
            raise ValueError(f"tensor {tensor.entry.name!r} is no delta of its parent: its type or size differs")
        pairs: list[tuple[Buffer, Buffer]] = []
        if tensor.held_new:
            missing = CHUNK_BYTES - len(tensor.held_new)
            tensor.hold(before[:missing], after[:missing])
            before, after = before[missing:], after[missing:]
            if len(tensor.held_new) == CHUNK_BYTES:
                pairs.append(tensor.released())
        full = len(after) - len(after) % CHUNK_BYTES
        self._encode([*pairs, *((before[part], after[part]) for part in chunks_of(full))])
        tensor.hold(before[full:], after[full:])

    def end(self) -> int:
        """End the tensor; returns the number of its elements that differ. Raises as `add` does."""
        tensor = self._tensor
        if tensor.seen != tensor.entry.size_bytes:
            raise ValueError(f"tensor {tensor.entry.name!r} has {tensor.seen} bytes, not {tensor.entry.size_bytes}")
        if tensor.held_new:
            self._encode([tensor.released()])
        if tensor.changed:
            self._index.append(tensor.entry)
        self._elements += tensor.seen // tensor.item_bytes
        self._changed += tensor.changed
        return tensor.changed

    def part(self) -> DeltaPart:
        """The facts of the file."""
        return DeltaPart(
            VersionFile(self._path.name, self._size, self._digest.hexdigest()), self._changed, self._elements
        )

    def _encode(self, pairs: Iterable[tuple[Buffer, Buffer]]) -> None:
        """Write chunks of the tensor: bytes before and after, encoded in threads, a few at a time."""
        running: deque[Future[tuple[bytes, int]]] = deque()
        for parent, new in pairs:
            if len(running) > self._threads:
                self._put_chunk(*running.popleft().result())
            running.append(self._pool.submit(encode_chunk, parent, new, self._tensor.item_bytes))
        while running:
            self._put_chunk(*running.popleft().result())

    def _put_chunk(self, chunk: bytes, differ: int) -> None:
        tensor = self._tensor
        tensor.changed += differ
        tensor.same.append(chunk)
        if tensor.changed:
            self._put(b"".join(tensor.same))
            tensor.same.clear()

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
