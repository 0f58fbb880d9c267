"""Cuts the attention of a forest into pieces that kernels compute without a mask, or with a small one. Pure.

The tokens are in depth-first order. A chain is a run of tokens without a branch, such as a prompt or one answer. Its
keys are seen by its own tokens, each by those after it, and by all tokens of its descendants, which follow it directly:

    tokens     a b c d │ e f g │ h i        (two answers, efg and hi, to the prompt abcd)
    own        abcd × abcd causal,  efg × efg causal,  hi × hi causal
    descent    efghi × abcd

No pair of a query and a key is in two pieces, and together the pieces are the whole attention. Small sibling trees
become one piece with a mask of at most SMALL × SMALL, because many small kernels cost more than a masked one.

A sliding window cuts pieces further, into tiles that the window sees whole, sees not at all, or sees in part. Only the
last kind needs a mask, of at most TILE × TILE. N: tokens, C: chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import Int32

SMALL = 32
"""Sibling trees of together at most this many tokens become one masked piece."""
TILE = 512
"""Side of the tiles into which a sliding window cuts pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [query, query_stop) over keys [key, key_stop): all of them, causal, or those that a mask shows."""

    query: int
    query_stop: int
    key: int
    key_stop: int
    causal: bool = False
    masked: bool = False

    @property
    def own(self) -> bool:
        """Whether its queries are its keys. Each token is in one such piece, and these pieces come first."""
        return self.query == self.key


@dataclass(frozen=True, slots=True)
class Chain:
    """A run of tokens [start, stop) without a branch; its last descendant is before `end`."""

    start: int
    stop: int
    end: int
    parent: int  # the index of the chain that it follows; -1 at a root


def chains(ends_N: Int32) -> list[Chain]:
    """The chains of a forest, in depth-first order. `ends_N` holds one past each token's last descendant.

    A token continues the chain of the token before it if both have the same last descendant.
    """
    starts = np.flatnonzero(np.diff(ends_N, prepend=-1)).tolist()
    out: list[Chain] = []
    path: list[int] = []  # the open chains, from the root
    for start, stop in zip(starts, [*starts[1:], len(ends_N)], strict=True):
        while path and out[path[-1]].end <= start:
            path.pop()
        out.append(Chain(start, stop, int(ends_N[start]), path[-1] if path else -1))
        path.append(len(out) - 1)
    return out


def pieces(found: Sequence[Chain], small: int = SMALL) -> list[Piece]:
    """The attention of a forest without a window; own pieces first."""
    own: list[Piece] = []
    shared: list[Piece] = []
    i = 0
    while i < len(found):
        here = found[i]
        j, stop = _siblings(found, i, small)
        if j > i + 1:
            own.append(Piece(here.start, stop, here.start, stop, masked=True))
            i = j
            continue
        own.append(Piece(here.start, here.stop, here.start, here.stop, causal=True))
        if here.end > here.stop:
            shared.append(Piece(here.stop, here.end, here.start, here.stop))
        i += 1
    return own + shared


def _siblings(found: Sequence[Chain], first: int, small: int) -> tuple[int, int]:
    """The chain and the token after the longest run of whole sibling trees, from chain `first` on, of at most `small`
    tokens; (first, …) when the first tree is larger.
    """
    begin, after, stop = found[first].start, first, found[first].start
    while after < len(found) and found[after].parent == found[first].parent and found[after].end - begin <= small:
        stop = found[after].end
        while after < len(found) and found[after].start < stop:
            after += 1
    return after, stop


def windowed(whole: Sequence[Piece], positions_N: Int32, window: int, tile: int = TILE) -> list[Piece]:
    """The same attention where a token sees only keys that are less than `window` positions before it."""
    out: list[Piece] = []
    for piece in whole:
        out.extend(_windowed(piece, positions_N, window, tile))
    return sorted(out, key=lambda p: not p.own)  # a stable sort


def _windowed(piece: Piece, positions_N: Int32, window: int, tile: int) -> Iterator[Piece]:
    """The part of one piece within the window."""
    first, last = int(positions_N[piece.key]), int(positions_N[piece.query : piece.query_stop].max())
    if last - first < window:
        yield piece
        return
    if piece.masked:  # small; its mask applies the window
        yield piece
        return
    for query in range(piece.query, piece.query_stop, tile):
        stop = min(query + tile, piece.query_stop)
        depths = positions_N[query:stop]
        # Keys of a chain have consecutive positions. Those at `whole` and above are seen by every query of the tile,
        # those below `some` by none.
        offset = piece.key - first
        some = max(piece.key, int(depths.min()) - window + 1 + offset)
        whole = max(piece.key, int(depths.max()) - window + 1 + offset)
        limit = query if piece.causal else piece.key_stop
        if piece.causal:
            yield Piece(query, stop, query, stop, causal=whole <= query, masked=whole > query)
        for key in range(some, min(whole, limit), tile):
            yield Piece(query, stop, key, min(key + tile, whole, limit), masked=True)
        if whole < limit:
            yield Piece(query, stop, max(whole, piece.key), limit)


def visible(
    ends_N: Int32, positions_N: Int32, window: int | None = None
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """(N, N) whether query i attends to key j: the definition, for small forests and for tests."""
    i = np.arange(len(ends_N))
    sees = (i[None, :] <= i[:, None]) & (i[:, None] < ends_N[None, :])
    if window is not None:
        sees &= positions_N[:, None] - positions_N[None, :] < window
    return sees
