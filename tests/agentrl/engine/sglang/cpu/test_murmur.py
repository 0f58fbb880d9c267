"""The hash of seeded sampling against MurmurHash3 as it is published."""

from __future__ import annotations

import struct

import pytest
import torch

from agentrl.engine.sglang.cpu.murmur import murmur_hash32


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """Appleby's MurmurHash3_x86_32 with seed 0, for a whole number of blocks."""
    hashed = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = rotated(block * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        hashed = (rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return hashed ^ hashed >> 16


def test_the_reference_is_the_published_hash() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"") == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_each_row_and_column_is_hashed_as_16_bytes(dtype: torch.dtype) -> None:
    seeds, positions = [0, 1, 42, 2**62 + 3, 2**63 - 1], [0, 7, 4095, 2**20, 2**31 - 1]
    columns = torch.arange(0, 200_000, 3331)
    found = murmur_hash32(torch.tensor(seeds).to(dtype), torch.tensor(positions), columns)
    for row, seed, position in zip(found.tolist(), seeds, positions, strict=True):
        assert row == [murmur3(struct.pack("<QII", seed, position, column)) for column in columns.tolist()]


def test_values_are_spread_evenly() -> None:
    found = murmur_hash32(torch.arange(64), torch.full((64,), 9), torch.arange(4096)).double() / 2**32
    assert abs(found.mean().item() - 1 / 2) < 0.005
    assert abs(found.var().item() - 1 / 12) < 0.005
