"""The head of a safetensors file: its tensors, and where their bytes are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

LENGTH_BYTES = 8
HEADER_BYTES = 100_000_000
"""Size of the largest header, as in safetensors."""
MOST_BYTES = 1 << 50
"""Size of the largest file or tensor."""
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of an element, by the names of safetensors types."""
Dimensions = Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_BYTES)], ...], Meta(max_length=16)]
Offset = Annotated[int, Meta(ge=0, le=MOST_BYTES)]


class Entry(NamedTuple):
    """A tensor: its type (safetensors' name) and shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """The number of its bytes."""
        return self.end - self.start


class Header(NamedTuple):
    """The head of a file as bytes, its length included, and the tensors in the order of their bytes."""

    data: bytes
    entries: Sequence[Entry]


class _Raw(msgspec.Struct):
    dtype: str
    shape: Dimensions
    data_offsets: tuple[Offset, Offset]


def read_header(path: Path) -> Header:
    """Read and check the head of a file, whose tensors must follow each other without holes up to its end.

    Raises ValueError, which names the file, for any other, and OSError.
    """
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(prefix := file.read(LENGTH_BYTES), "little")
        if length > min(HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"{path} is not a safetensors file")
        data = file.read(length)
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        found = {name: msgspec.json.decode(raw[name], type=_Raw) for name in raw.keys() - {"__metadata__"}}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    end, entries = LENGTH_BYTES + length, []
    for name, entry in sorted(found.items(), key=lambda item: (item[1].data_offsets, item[0])):
        first, after = (LENGTH_BYTES + length + offset for offset in entry.data_offsets)
        if first != end or after - first != _size(entry):
            raise ValueError(f"{path} has a damaged header: the offsets of {name[:200]!r}")
        entries.append(Entry(name, entry.dtype, entry.shape, first, after))
        end = after
    if end != size:
        raise ValueError(f"{path} has {size} bytes, not {end}")
    return Header(prefix + data, entries)


def _size(entry: _Raw) -> int:
    elements = 1
    for length in entry.shape:
        elements *= length
    return elements * ITEM_BYTES.get(entry.dtype, 0)
