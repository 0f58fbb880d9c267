"""Packs the likeliest tokens at each place of an output: what an engine reports as top logprobs.

K: tokens at a place. Their number is the same at every place, but for an engine's omissions, which are filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from agentrl.domain.schemas import Float32, Int32
from agentrl.store.db import codec

NO_TOKEN = -1
"""Fills the places of tokens that the engine did not report; their logprob is NaN."""

Rows = Sequence[Sequence[Sequence[Any]]]
"""For each output token the (logprob, id) of the likeliest tokens, best first."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest tokens of an output of T tokens, best first. K >= 1."""

    ids: Int32  # (T, K)
    logprobs: Float32  # (T, K)

    @classmethod
    def of(cls, rows: Rows) -> Likeliest:
        """The arrays of some rows."""
        shape = len(rows), max(map(len, rows), default=1) or 1
        ids, logprobs = np.full(shape, NO_TOKEN, np.int32), np.full(shape, np.nan, np.float32)
        for i, row in enumerate(rows):
            if row:
                logprobs[i, : len(row)], ids[i, : len(row)] = zip(*row, strict=True)
        return cls(ids, logprobs)

    @property
    def rows(self) -> list[list[tuple[float, int]]]:
        """Inverse of `of`."""
        return [
            [pair for pair in zip(logprobs, ids, strict=True) if pair[1] != NO_TOKEN]
            for logprobs, ids in zip(self.logprobs.tolist(), self.ids.tolist(), strict=True)
        ]


def pack(rows: Rows) -> bytes:
    """The rows as zstd of little-endian numbers: K, the logprobs by place, the ids by place. NUL comes first."""
    made = Likeliest.of(rows)
    planes = codec.planes(made.logprobs.T, "<f4") + codec.planes(made.ids.T, "<i4")
    return codec.compress(b"\0" + np.array([made.ids.shape[1]], "<u4").tobytes() + planes)


def unpack(blob: bytes) -> Likeliest:
    """Inverse of `pack`. Older versions packed the rows as JSON, whose first byte is a bracket."""
    raw = codec.decompress(blob)
    if raw[:1] == b"[":
        return Likeliest.of(orjson.loads(raw))
    width = int.from_bytes(raw[1:5], "little")
    logprobs, ids = raw[5 : 5 + (len(raw) - 5) // 2], raw[5 + (len(raw) - 5) // 2 :]
    return Likeliest(
        np.ascontiguousarray(codec.from_planes(ids, width, "<i4").T).astype(np.int32, copy=False),
        np.ascontiguousarray(codec.from_planes(logprobs, width, "<f4").T).astype(np.float32, copy=False),
    )
