"""Reads delta files, which come from outside. Every size is compared before memory is used for it.

Errors are DamagedObject and name the file. The digests of the tensors are compared by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from agentrl.errors import DamagedObject
from agentrl.versions.delta_codec import HEADER, apply_chunk, chunks_of, packed_bytes
from agentrl.versions.delta_writer import MAGIC, TRAILER, IndexEntry
from agentrl.versions.version_manifest import MANIFEST_BYTES, TensorFacts


class Chunk(NamedTuple):
    """An encoded chunk of a tensor."""

    header: bytes
    packed: bytes


class DeltaFile:
    """A delta file, whose chunks can be read by several threads. It is open only while chunks are read.

    Raises DamagedObject, and OSError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb", buffering=0) as file:
            self._tensors = self._index(file.fileno())

    @property
    def names(self) -> set[str]:
        """The tensors that the file changes."""
        return set(self._tensors)

    def chunks(self, tensor: TensorFacts) -> Iterator[Chunk]:
        """The chunks of a tensor in order. Raises DamagedObject when the tensor has another type or size."""
        entry = self._tensors[tensor.name]
        if (entry.dtype, entry.size_bytes) != (tensor.dtype, tensor.size_bytes):
            raise self._damaged(f"its tensor {tensor.name!r} has another type or size than the version's")
        with self._path.open("rb", buffering=0) as file:
            at, header = entry.start, self._read(file.fileno(), entry.start, HEADER.size)
            for part in chunks_of(tensor.size_bytes):
                try:
                    size = packed_bytes(header, part.stop - part.start)
                except ValueError as error:
                    raise self._damaged(str(error)) from error
                at += HEADER.size
                both = self._read(file.fileno(), at, size + HEADER.size)  # the trailer is longer than a header
                yield Chunk(header, both[:size])
                at, header = at + size, both[size:]

    def apply(self, chunk: Chunk, target: memoryview, item_bytes: int) -> None:
        """Turn the parent's bytes of a chunk into the new ones. Raises DamagedObject; `target` is then undefined."""
        try:
            apply_chunk(chunk.header, chunk.packed, target, item_bytes)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _index(self, descriptor: int) -> dict[str, IndexEntry]:
        size = os.fstat(descriptor).st_size
        if size < len(MAGIC) + TRAILER.size or self._read(descriptor, 0, len(MAGIC)) != MAGIC:
            raise self._damaged("it is not a delta file")
        length, magic = TRAILER.unpack(self._read(descriptor, size - TRAILER.size, TRAILER.size))
        start = size - TRAILER.size - length
        if magic != MAGIC or length > MANIFEST_BYTES or start < len(MAGIC):
            raise self._damaged("it is truncated")
        try:
            entries = msgspec.json.decode(self._read(descriptor, start, length), type=list[IndexEntry])
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its index cannot be read: {error}") from error
        found = {entry.name: entry for entry in entries}
        if len(found) != len(entries):
            raise self._damaged("it has a tensor twice")
        return found

    def _read(self, descriptor: int, start: int, size: int) -> bytes:
        data = os.pread(descriptor, size, start)
        if len(data) != size:
            raise self._damaged("it is truncated")
        return data

    def _damaged(self, what: str) -> DamagedObject:
        return DamagedObject(f"{self._path} is damaged: {what}")
