"""The codec of deltas: exact for any bits, and bounded for any bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.versions.delta_codec import (
    CHUNK_BYTES,
    DENSE,
    HEADER,
    SAME,
    SPARSE,
    apply_chunk,
    chunks_of,
    encode_chunk,
    packed_bytes,
)

SIZES = [1, 2, 4, 8]


def through(parent: bytes, new: bytes, item_bytes: int) -> bytes:
    """`new`, made from the parent and the encoded chunk."""
    chunk, changed = encode_chunk(parent, new, item_bytes)
    header, packed = chunk[: HEADER.size], chunk[HEADER.size :]
    assert packed_bytes(header, len(new)) == len(packed)
    made = bytearray(parent)
    assert apply_chunk(header, packed, memoryview(made), item_bytes) == changed
    return bytes(made)


@given(st.data(), st.sampled_from(SIZES), st.integers(0, 700), st.floats(0, 1))
def test_it_is_exact(data: st.DataObject, item_bytes: int, elements: int, density: float) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parent = rng.bytes(elements * item_bytes)
    new = np.frombuffer(parent, f"<u{item_bytes}").copy()
    places = rng.random(elements) < density
    new[places] = rng.integers(0, 2 ** (8 * item_bytes), places.sum(), dtype=np.uint64).astype(new.dtype)
    assert through(parent, new.tobytes(), item_bytes) == new.tobytes()


@given(st.sampled_from(SIZES), st.binary(max_size=400), st.binary(max_size=400))
def test_it_is_exact_for_any_bytes(item_bytes: int, one: bytes, other: bytes) -> None:
    size = min(len(one), len(other)) // item_bytes * item_bytes
    assert through(one[:size], other[:size], item_bytes) == other[:size]


@pytest.mark.parametrize("item_bytes", SIZES)
def test_long_gaps(item_bytes: int) -> None:
    parent = bytes(5000 * item_bytes)
    new = bytearray(parent)
    for place in (0, 254, 255, 511, 512, 4999):  # gaps of 253, 0, 255, 0 and more than 255
        new[place * item_bytes] = 1
    assert encode_chunk(parent, bytes(new), item_bytes)[0][0] == SPARSE
    assert through(parent, bytes(new), item_bytes) == new


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("<u2", [0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0x8000, 0, 0x7F81]),
        ("<u4", [0x7FC00000, 0x7F800001, 0xFF800000, 0x80000000, 0]),
        ("<u8", [0x7FF8000000000001, 0xFFF0000000000000, 1 << 63, 0]),
    ],
    ids=["2 bytes", "4 bytes", "8 bytes"],
)
def test_bits_of_nan_infinity_and_negative_zero(dtype: str, numbers: list[int]) -> None:
    bits = np.array(numbers, dtype)
    for shift in range(len(bits)):
        new = np.roll(bits, shift)
        assert through(bits.tobytes(), new.tobytes(), bits.itemsize) == new.tobytes()


def test_an_equal_chunk_is_a_header() -> None:
    chunk, changed = encode_chunk(b"abcd", b"abcd", 2)
    assert (chunk, changed) == (HEADER.pack(SAME, 0, 0, 0), 0)


def test_it_is_small_where_little_changed() -> None:
    rng = np.random.default_rng(0)
    parent = rng.integers(0, 2**16, CHUNK_BYTES // 2, dtype=np.uint16)
    new = parent + (rng.random(len(parent)) < 0.03).astype(np.uint16)
    chunk, _ = encode_chunk(parent.tobytes(), new.tobytes(), 2)
    assert len(chunk) < 0.02 * CHUNK_BYTES


def test_a_dense_chunk_is_hardly_larger_than_the_tensor() -> None:
    rng = np.random.default_rng(0)
    chunk, _ = encode_chunk(rng.bytes(CHUNK_BYTES), rng.bytes(CHUNK_BYTES), 2)
    assert chunk[0] == DENSE
    assert len(chunk) < 1.01 * CHUNK_BYTES


def test_it_works_at_any_address() -> None:
    """Tensors in a file need not be aligned."""
    parent, new = bytes(range(41)), bytes(reversed(range(41)))
    chunk, _ = encode_chunk(memoryview(parent)[1:], memoryview(new)[1:], 8)
    made = bytearray(parent)
    apply_chunk(chunk[: HEADER.size], chunk[HEADER.size :], memoryview(made)[1:], 8)
    assert made[1:] == new[1:]


def test_chunks_cover_a_tensor() -> None:
    assert list(chunks_of(0)) == []
    parts = list(chunks_of(2 * CHUNK_BYTES + 2))
    assert [part.stop - part.start for part in parts] == [CHUNK_BYTES, CHUNK_BYTES, 2]


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 elements, the new one 1"):
        encode_chunk(b"abcd", b"ab", 2)
    with pytest.raises(ValueError, match="not elements"):
        encode_chunk(b"abc", b"abc", 2)


BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))


@pytest.mark.parametrize(
    ("header", "packed"),
    [
        (HEADER.pack(SPARSE, 2, 0, len(BOMB)), BOMB),
        (HEADER.pack(DENSE, 2, 0, len(BOMB)), BOMB),
        (HEADER.pack(DENSE, 0, 0, 0), b""),
        (HEADER.pack(SPARSE, 4, 0, 4), b"junk"),
        (HEADER.pack(SPARSE, 100, 0, 4), b"junk"),
        (HEADER.pack(SPARSE, 1, 1, 0), zstandard.compress(b"\x01" + bytes(4) + b"ab")),
        (HEADER.pack(SPARSE, 1, 1, 0), zstandard.compress(b"\xff" + struct.pack("<I", 2**32 - 1) + b"ab")),
        (HEADER.pack(SPARSE, 2, 0, 0), zstandard.compress(b"\x03\x03abcd")),
        (HEADER.pack(SPARSE, 1, 0, 0), zstandard.compress(b"\x01ab") + b"more"),
    ],
    ids=["bomb", "dense bomb", "none", "junk", "many", "no long gap", "far", "behind the end", "more"],
)
def test_damaged_chunks_are_refused(header: bytes, packed: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        apply_chunk(header, packed, memoryview(bytearray(8)), 2)


def test_a_frame_without_its_size_is_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x01ab")
    with pytest.raises(ValueError, match="another size"):
        apply_chunk(HEADER.pack(SPARSE, 1, 0, len(packed)), packed, memoryview(bytearray(8)), 2)


@pytest.mark.parametrize(
    "header",
    [(3, 1, 0, 1), (SPARSE, 1, 2, 1), (SPARSE, 9, 0, 1), (DENSE, 1, 0, 2**32 - 1), (SAME, 0, 0, 1)],
    ids=["mode", "long gaps", "elements", "bytes", "same"],
)
def test_damaged_headers_are_refused(header: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="chunk"):
        packed_bytes(HEADER.pack(*header), 8)


@settings(max_examples=200)
@given(st.binary(min_size=HEADER.size, max_size=60), st.sampled_from(SIZES))
def test_garbage_never_writes_elsewhere(data: bytes, item_bytes: int) -> None:
    memory = bytearray(24)
    header, packed = data[: HEADER.size], data[HEADER.size :]
    try:
        packed_bytes(header, 8)
        apply_chunk(header, packed, memoryview(memory)[8:16], item_bytes)
    except ValueError:
        pass
    assert memory[:8] == memory[16:] == bytes(8)
