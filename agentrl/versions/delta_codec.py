"""What changed in a chunk of a tensor, exactly: the gaps between the elements that changed, and their differences.

    header   mode (1 byte), changed elements, long gaps, packed bytes (4 bytes each, little-endian)
    packed   zstandard of, for a SPARSE chunk: a byte per changed element with the number of equal elements before it
             (255: the number is in the list of long gaps), the long gaps (4 bytes each), and the differences;
             for a DENSE chunk: the differences of all elements. SAME chunks have none.

A difference is `new - parent` of the elements' bits as integers of their size, modulo 2^bits, folded so that small
differences of either sign are small numbers (0, -1, 1, -2, … become 0, 1, 2, 3, …). Differences are stored in byte
planes: the lowest bytes of all elements, then the next.

A tensor is cut into chunks of CHUNK_BYTES, so memory is bounded. `apply_chunk` knows the exact size of what it unpacks
before it unpacks it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

CHUNK_BYTES: Final = 2 << 20
"""Bytes of a tensor in a chunk; its last chunk is shorter."""
HEADER: Final = struct.Struct("<BIII")
SAME, SPARSE, DENSE = 0, 1, 2
PACKING: Final = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=9, window_log=21)
"""Parameters of zstandard. Gaps and differences hardly repeat, so short matches are not searched for."""
LONG = 255
DENSE_FROM = 0.5
"""Share of changed elements from which all differences are stored."""

Buffer = memoryview | bytes | bytearray
Integers = npt.NDArray[Any]


def chunks_of(size_bytes: int) -> Iterator[slice]:
    """The byte ranges of a tensor's chunks."""
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield slice(start, min(start + CHUNK_BYTES, size_bytes))


def encode_chunk(parent: Buffer, new: Buffer, item_bytes: int) -> tuple[bytes, int]:
    """The chunk that turns `parent` into `new` (header and packed bytes), and the number of elements that differ.

    Raises ValueError for buffers of unequal length.
    """
    before, after = _integers(parent, item_bytes), _integers(new, item_bytes)
    if len(before) != len(after):
        raise ValueError(f"the parent's chunk has {len(before)} elements, the new one {len(after)}")
    differs = before != after
    changed = int(np.count_nonzero(differs))
    if changed == 0:
        return HEADER.pack(SAME, 0, 0, 0), 0
    if changed >= DENSE_FROM * len(before):
        packed = _pack(_planes(_folded(after - before)))
        return HEADER.pack(DENSE, changed, 0, len(packed)) + packed, changed
    places = np.flatnonzero(differs)
    gaps = np.diff(places, prepend=-1) - 1
    long = gaps[gaps >= LONG].astype("<u4")
    short = np.minimum(gaps, LONG).astype(np.uint8)
    packed = _pack(b"".join((short.tobytes(), long.tobytes(), _planes(_folded(after[places] - before[places])))))
    return HEADER.pack(SPARSE, changed, len(long), len(packed)) + packed, changed


def packed_bytes(header: bytes, size_bytes: int) -> int:
    """Bytes that follow a chunk's header, for a chunk of `size_bytes`. Raises ValueError for an implausible header."""
    mode, changed, long, packed = HEADER.unpack(header)
    if mode not in (SAME, SPARSE, DENSE) or long > changed or changed > size_bytes:
        raise ValueError("a chunk's header is damaged")
    if packed > 2 * CHUNK_BYTES or (mode == SAME and packed):
        raise ValueError("a chunk is larger than any chunk")
    return int(packed)


def apply_chunk(header: bytes, packed: Buffer, target: memoryview, item_bytes: int) -> int:
    """Turn the parent's bytes in `target` into the new ones; returns the number of elements that changed.

    Raises ValueError for a damaged chunk; `target` is then undefined.
    """
    mode, changed, long, _ = HEADER.unpack(header)
    out = _integers(target, item_bytes)
    if mode == SAME:
        return 0
    if changed > len(out) or changed == 0:
        raise ValueError("a chunk changes more elements than it has")
    if mode == DENSE:
        out += _unfolded(_from_planes(_unpack(packed, len(out) * item_bytes), item_bytes))
        return int(changed)
    data = _unpack(packed, changed + 4 * long + changed * item_bytes)
    gaps = np.frombuffer(data, np.uint8, changed).astype(np.int64)
    is_long = gaps == LONG
    if np.count_nonzero(is_long) != long:
        raise ValueError("a chunk has another number of long gaps than its header states")
    gaps[is_long] = np.frombuffer(data, "<u4", long, changed)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= len(out):
        raise ValueError("a chunk changes elements behind its end")
    out[places] += _unfolded(_from_planes(memoryview(data)[changed + 4 * long :], item_bytes))
    return int(changed)


def _integers(data: Buffer, item_bytes: int) -> Integers:
    if item_bytes not in (1, 2, 4, 8) or len(data) % item_bytes:
        raise ValueError(f"{len(data)} bytes are not elements of {item_bytes} bytes")
    return np.frombuffer(data, f"<u{item_bytes}")


def _folded(differences: Integers) -> Integers:
    """Small numbers for small differences of either sign: the sign becomes the lowest bit."""
    bits = 8 * differences.dtype.itemsize
    signs = differences.view(f"<i{differences.dtype.itemsize}") >> (bits - 1)
    return (differences << 1) ^ signs.view(differences.dtype)


def _unfolded(folded: Integers) -> Integers:
    return (folded >> 1) ^ (~(folded & 1) + 1)


def _planes(values: Integers) -> bytes:
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(data: Buffer, item_bytes: int) -> Integers:
    planes = np.frombuffer(data, np.uint8).reshape(item_bytes, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{item_bytes}")


def _pack(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=PACKING).compress(data)


def _unpack(packed: Buffer, size_bytes: int) -> bytes:
    """Unpack exactly `size_bytes`. The size in the frame's header is compared before anything is allocated."""
    try:
        if zstandard.frame_content_size(packed) != size_bytes:
            raise ValueError("a chunk has another size than its header states")
        data = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a chunk cannot be unpacked: {error}") from error
    if len(data) != size_bytes:
        raise ValueError("a chunk has another size than its header states")
    return data
