"""Plans which tokens are computed together: prefix trees, balance over ranks, microbatches under a token budget. Pure.

A group's samples share their prompt, and often their first outputs. Merged into a tree, every distinct prefix is
computed once; a token attends to its ancestors only, so the results equal those of the separate sequences:

    sequences          tree (depth-first)     ends       token i sees token j  iff  j <= i < ends[j]
    a b c d            a b c d e f            6 6 4 4 6 6
    a b e f
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentrl.domain.schemas import Int32


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Sequences merged on common prefixes: N nodes in depth-first order, one token each."""

    token_ids: Int32  # (N,)
    positions: Int32  # (N,) depth of the node: the position of its token in the sequence
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
    """Merge sequences, in one pass: in sorted order each one shares its longest prefix with its predecessor."""
    paths: dict[int, Int32] = {}
    tokens: list[Int32] = []
    positions: list[Int32] = []
    ends = np.empty(sum(len(s) for s in sequences), np.int32)
    size = 0
    ids = path = np.empty(0, np.int32)  # of the predecessor
    for i in _sorted(sequences):
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
    return PrefixTree(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(positions),
        ends[:size].copy(),
        [paths[i] for i in range(len(sequences))],
    )


def line_up(sequences: Sequence[Int32]) -> PrefixTree:
    """A tree of sequences one after another. No two of them share a node."""
    lengths = np.array([len(s) for s in sequences])
    ends = np.cumsum(lengths)
    return PrefixTree(
        np.concatenate(sequences).astype(np.int32),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        np.repeat(ends, lengths).astype(np.int32),
        np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1]),
    )


def split_by_budget(sequences: Sequence[Int32], budget: int) -> list[tuple[list[int], int]]:
    """Indices of sequences, in parts whose trees hold at most `budget` tokens, with the tokens of each tree; a longer
    sequence is a part by itself.
    """
    if not sequences:
        return []
    order = _sorted(sequences)
    parts = [([order[0]], len(sequences[order[0]]))]
    for previous, i in pairwise(order):
        part, used = parts[-1]
        new = len(sequences[i]) - common_prefix(sequences[previous], sequences[i])
        if used + new <= budget:
            parts[-1] = ([*part, i], used + new)
        else:
            parts.append(([i], len(sequences[i])))
    return parts


def _sorted(sequences: Sequence[Int32]) -> list[int]:
    """Indices of the sequences in lexicographic order, so that sequences with a common prefix are together.

    Bytes of big-endian ids are in the order of the ids, and compare fast.
    """
    keys = [np.asarray(ids).astype(">u4").tobytes() for ids in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def balance(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Spread items over `bins`: largest first, each into the bin that is least full."""
    loads: Counter[int] = Counter()
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(bins), key=lambda b: loads[b])
        out[lightest].append(i)
        loads[lightest] += sizes[i]
    return out


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing of items into parts of at most `budget`; a larger item is a part by itself."""
    parts: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fit = next((p for p, room in enumerate(free) if sizes[i] <= room), None)
        if fit is None:
            parts.append([i])
            free.append(budget - sizes[i])
        else:
            parts[fit].append(i)
            free[fit] -= sizes[i]
    return parts
