"""The blocks of BLOCK × BLOCK pairs in which FlexAttention computes a forest: seen whole, in part, or not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.domain.schemas import Int32
from agentrl.trainer.attention.pieces import Piece

BLOCK = 128
"""Side of a block: FlexAttention's default."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Per row of blocks: how many there are, and the columns of these first, then the others. R: rows of blocks."""

    partial_R: Int32
    partial_RR: Int32
    whole_R: Int32
    whole_RR: Int32


def blocks(cut: Sequence[Piece], sees: Any, tokens: int, side: int = BLOCK) -> Blocks:
    """The blocks of an attention in pieces. `sees(piece)` is a masked piece's (Q, K) bool mask."""
    pairs_RR = visible_pairs(cut, sees, tokens, side)
    whole_RR = pairs_RR == side * side
    partial_RR = (pairs_RR > 0) & ~whole_RR
    return Blocks(*_listed(partial_RR), *_listed(whole_RR))


def visible_pairs(cut: Sequence[Piece], sees: Any, tokens: int, side: int = BLOCK) -> NDArray[np.int64]:
    """(R, R) the visible pairs of each block: the sum over pieces, which share no pair."""
    count = -(-tokens // side)
    pairs_RR = np.zeros((count, count), np.int64)
    for p in cut:
        rows, columns = _range(p.query, p.query_stop, side), _range(p.key, p.key_stop, side)
        in_rows, in_columns = _overlaps(p.query, p.query_stop, rows, side), _overlaps(p.key, p.key_stop, columns, side)
        part = pairs_RR[rows, columns]
        if p.masked:
            edges = [np.concatenate([[0], np.cumsum(sizes)[:-1]]) for sizes in (in_rows, in_columns)]
            part += np.add.reduceat(np.add.reduceat(sees(p).astype(np.int64), edges[0], 0), edges[1], 1)
        elif p.causal:
            part += np.tril(np.outer(in_rows, in_columns), -1) + np.diag(in_rows * (in_rows + 1) // 2)
        else:
            part += np.outer(in_rows, in_columns)
    return pairs_RR


def _range(start: int, stop: int, side: int) -> slice:
    """The blocks that tokens [start, stop) touch."""
    return slice(start // side, -(-stop // side))


def _overlaps(start: int, stop: int, touched: slice, side: int) -> NDArray[np.int64]:
    """How many of the tokens are in each touched block."""
    edges = np.arange(touched.start, touched.stop + 1, dtype=np.int64) * side
    return np.diff(np.clip(edges, start, stop))


def _listed(chosen_RR: NDArray[np.bool_]) -> tuple[Int32, Int32]:
    return chosen_RR.sum(1, dtype=np.int32), np.argsort(~chosen_RR, axis=1, kind="stable").astype(np.int32)
