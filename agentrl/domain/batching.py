"""Which tokens are computed together: prefix trees, a balance over ranks, microbatches under a token budget. Pure.

A group's samples share their prompt, and often their first outputs. Merged into a tree, every distinct prefix is
computed once; a token attends to its ancestors, so the numbers are those of the separate sequences:

    sequences          tree (depth-first)     ends       token i sees token j  iff  j <= i < ends[j]
    a b c d            a b c d e f            6 6 4 4 6 6
    a b e f
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import Int32


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Sequences merged on common prefixes: N nodes in depth-first order, one token each."""

    token_ids: Int32  # (N,)
    positions: Int32  # (N,) depth of the node: where its token stands in its sequence
    ends: Int32  # (N,) one past the node's last descendant
    paths: list[Int32]  # per sequence, (T,) the nodes of its tokens, in the order the sequences were given

    def __len__(self) -> int:
        return len(self.token_ids)


def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def build_tree(sequences: Sequence[Int32]) -> PrefixTree:
    """Merge sequences. In sorted order each one shares its longest prefix with its predecessor, so one pass does."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    paths: list[Int32] = [np.empty(0, np.int32)] * len(sequences)
    tokens: list[Int32] = []
    positions: list[Int32] = []
    ends = np.empty(sum(len(s) for s in sequences), np.int32)
    size = 0
    ids, path = np.empty(0, np.int32), np.empty(0, np.int32)
    for i in order:
        shared = common_prefix(ids, sequences[i])
        ends[path[shared:]] = size  # the predecessor's own branch is complete
        ids = sequences[i]
        new = np.arange(size, size + len(ids) - shared, dtype=np.int32)
        path = np.concatenate([path[:shared], new])
        tokens.append(ids[shared:])
        positions.append(np.arange(shared, len(ids), dtype=np.int32))
        size += len(new)
        paths[i] = path
    ends[path] = size
    return PrefixTree(np.concatenate(tokens).astype(np.int32), np.concatenate(positions), ends[:size].copy(), paths)


def line_up(sequences: Sequence[Int32]) -> PrefixTree:
    """Sequences one after another, none of which shares a token with another."""
    lengths = np.array([len(s) for s in sequences])
    ends = np.cumsum(lengths)
    return PrefixTree(
        np.concatenate(sequences).astype(np.int32),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        np.repeat(ends, lengths).astype(np.int32),
        [np.arange(end - n, end, dtype=np.int32) for n, end in zip(lengths, ends, strict=True)],
    )


def split_by_budget(sequences: Sequence[Int32], budget: int) -> list[list[int]]:
    """Indices of sequences, in parts whose trees hold at most `budget` tokens (a longer sequence stands alone)."""
    parts: list[list[int]] = []
    used = 0
    previous: Int32 | None = None
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].tolist()):
        ids = sequences[i]
        new = len(ids) - (common_prefix(previous, ids) if previous is not None else 0)
        if previous is None or used + new > budget:
            parts.append([])
            used, new = 0, len(ids)
        parts[-1].append(i)
        used += new
        previous = ids
    return parts


def balance(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Spread items over `bins`: largest first, each into the bin that is least full."""
    loads = [0] * bins
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = loads.index(min(loads))
        out[lightest].append(i)
        loads[lightest] += sizes[i]
    return out


def pack_grids(sizes: Sequence[int], budget: int) -> list[list[list[int]]]:
    """First-fit decreasing of items into grids of rows: `grids[g][r]` lists the items of one row.

    A grid is one forward pass: rows × width <= budget, where width is its largest item (a larger item than the budget
    gets a grid of one row). Rows of equal width keep attention quadratic in one tree, not in the whole batch.
    """
    left = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    grids: list[list[list[int]]] = []
    while left:
        width = sizes[left[0]]
        max_rows = max(1, budget // width)
        rows: list[list[int]] = []
        free: list[int] = []
        rest: list[int] = []
        for i in left:
            fit = next((r for r, room in enumerate(free) if sizes[i] <= room), None)
            if fit is not None:
                rows[fit].append(i)
                free[fit] -= sizes[i]
            elif len(rows) < max_rows:
                rows.append([i])
                free.append(width - sizes[i])
            else:
                rest.append(i)
        grids.append(rows)
        left = rest
    return grids
