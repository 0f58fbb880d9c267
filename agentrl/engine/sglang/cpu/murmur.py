"""The hash of SGLang's seeded sampling in plain torch, since SGLang's own is a GPU kernel. Imports torch."""

from __future__ import annotations

import torch

LOW = 0xFFFFFFFF
LENGTH_BYTES = 16


def murmur_hash32(seeds_B: torch.Tensor, positions_B: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of 16 bytes: a row's seed (8), its position (4) and the column (4), little-endian.

    Returns values from 0 to 2³² − 1 as int64, one per row and column. Products wrap at 64 bits, which leaves the low
    32 as they are.
    """
    seed = seeds_B.to(torch.int64)
    row_B = _mixed(torch.zeros_like(seed), seed & LOW)
    row_B = _mixed(row_B, (seed >> 32) & LOW)
    row_B = _mixed(row_B, positions_B.to(torch.int64) & LOW)
    hashed_BV = _mixed(row_B[:, None], columns_V.to(torch.int64)[None, :] & LOW)
    return _finished(hashed_BV ^ LENGTH_BYTES)


def _mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & LOW
    block = (_rotated(block, 15) * 0x1B873593) & LOW
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & LOW


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & LOW


def _finished(hashed: torch.Tensor) -> torch.Tensor:
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & LOW
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & LOW
    return hashed ^ (hashed >> 16)
