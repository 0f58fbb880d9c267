"""Writes a delta file: the tensors that changed, each as its chunks.

    MAGIC
    tensor   name length (2 bytes), name, element bytes (1), tensor bytes (8), then its chunks (delta_codec)
    …
    END      0xffff, number of tensors (4 bytes)

Integers are little-endian. A tensor that is equal to its parent's is left out. Several writers write different files of
one delta; `manifest_of` joins their parts.
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

from agentrl.versions.delta_codec import CHUNK_BYTES, Buffer, chunks_of, encode_chunk
from agentrl.versions.version_manifest import ITEM_BYTES, Delta, VersionFile

MAGIC = b"ARLDELT1"
NAME_LENGTH = struct.Struct("<H")
TENSOR = struct.Struct("<BQ")
END = struct.Struct("<HI")
END_MARK = 0xFFFF
THREADS = min(4, os.cpu_count() or 1)


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
    """The tensor that is being written. The held bytes, before and after, are those of an incomplete chunk."""

    name: str
    head: bytes
    item_bytes: int
    size_bytes: int
    seen: int = 0
    changed: int = 0
    same: list[bytes] = field(default_factory=list)  # chunks before the first that differs
    held_parent: bytearray = field(default_factory=bytearray)
    held_new: bytearray = field(default_factory=bytearray)


class DeltaWriter:
    """Writes one delta file, tensor by tensor. A context manager; `part()` is valid after the block."""

    def __init__(self, path: Path, threads: int = THREADS) -> None:
        self._path = path
        self._threads = threads
        self._digest = hashlib.sha256()
        self._size = self._tensors = self._changed = self._elements = 0

    def __enter__(self) -> Self:
        self._file: BinaryIO = self._path.open("xb")
        self._pool = ThreadPoolExecutor(self._threads)
        self._put(MAGIC)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        try:
            if error[0] is None:
                self._put(END.pack(END_MARK, self._tensors))
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
        item_bytes, encoded = ITEM_BYTES.get(dtype), name.encode()
        if item_bytes is None or size_bytes % item_bytes or not 0 < len(encoded) < END_MARK:
            raise ValueError(f"tensor {name!r} cannot be written as a delta: {size_bytes} bytes of type {dtype}")
        head = NAME_LENGTH.pack(len(encoded)) + encoded + TENSOR.pack(item_bytes, size_bytes)
        self._tensor = _Tensor(name, head, item_bytes, size_bytes)
        self._elements += size_bytes // item_bytes

    def extend(self, parent: Buffer, new: Buffer) -> None:
        """Add the tensor's next bytes, before and after. Raises as `add` does."""
        tensor = self._tensor
        before, after = memoryview(parent).cast("B"), memoryview(new).cast("B")
        tensor.seen += len(after)
        if len(before) != len(after) or tensor.seen > tensor.size_bytes:
            raise ValueError(f"tensor {tensor.name!r} cannot be a delta of its parent: its type or size differs")
        pairs: list[tuple[Buffer, Buffer]] = []
        if tensor.held_new:
            missing = CHUNK_BYTES - len(tensor.held_new)
            tensor.held_parent += before[:missing]
            tensor.held_new += after[:missing]
            before, after = before[missing:], after[missing:]
            if len(tensor.held_new) == CHUNK_BYTES:
                pairs.append((tensor.held_parent, tensor.held_new))
                tensor.held_parent, tensor.held_new = bytearray(), bytearray()
        full = len(after) - len(after) % CHUNK_BYTES
        pairs += [(before[part], after[part]) for part in chunks_of(full)]
        self._encode(pairs)
        tensor.held_parent += before[full:]
        tensor.held_new += after[full:]

    def end(self) -> int:
        """End the tensor; returns the number of its elements that differ. Raises as `add` does."""
        tensor = self._tensor
        if tensor.seen != tensor.size_bytes:
            raise ValueError(f"tensor {tensor.name!r} has {tensor.seen} bytes, not {tensor.size_bytes}")
        if tensor.held_new:
            self._encode([(tensor.held_parent, tensor.held_new)])
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
        if not tensor.changed and differ:
            self._tensors += 1
            self._put(tensor.head + b"".join(tensor.same))
        tensor.changed += differ
        if tensor.changed:
            self._put(chunk)
        else:
            tensor.same.append(chunk)

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
