"""The order in which a run visits its tasks, as pure functions of the seed and the run's data cursor.

Cursor c of a run with several sources is draw d of one of them (`pick`); a draw is a position among the source's tasks
(`position`):

    c ── pick: a seeded cycle in which each source has its share ──► (source, d)
    d ── position: pass 0 shuffles block by block, later passes shuffle all tasks ──► task

A source in ascending order of difficulty is drawn from a window that rises instead (`rising`).

Nothing depends on how many tasks are stored, except whether a task is there yet. So the order is the same whether the
tasks were all stored before the run began, while it went on, or after a crash.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

BLOCK = 16_384
"""Tasks that the first pass shuffles together."""
CYCLE = 1000
"""Most draws of a cycle. A source has at least one of them."""
ROUNDS = 4


@lru_cache(maxsize=64)
def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many draws of a cycle each source has: at most CYCLE in total, in proportion to the weights.

    Raises ValueError where the smallest weight is below a thousandth of all.
    """
    total = sum(weights)
    if min(weights) / total * CYCLE < 1 - 1e-9:
        raise ValueError(f"weight: the smallest is below 1/{CYCLE} of the sum of all weights")
    for size in range(len(weights), CYCLE + 1):  # the smallest cycle that is exact
        exact = [weight / total * size for weight in weights]
        if all(abs(share - round(share)) < 1e-9 for share in exact):
            return tuple(map(round, exact))
    found = list(map(int, exact))
    largest_remainders = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in largest_remainders[: CYCLE - sum(found)]:
        found[i] += 1
    return tuple(found)


def pick(cursor: int, weights: Sequence[float], seed: int) -> tuple[int, int]:
    """The source of a cursor, and how many earlier cursors had it. Each cycle has its own seeded order."""
    if len(weights) == 1:
        return 0, cursor
    counts = shares(tuple(weights))
    cycle, offset = divmod(cursor, sum(counts))
    order = _cycle(counts, seed, cycle)
    source = order[offset]
    return source, cycle * counts[source] + order[:offset].count(source)


def drawn(cursor: int, weights: Sequence[float], seed: int) -> list[int]:
    """How many cursors before this one had each source."""
    if len(weights) == 1:
        return [cursor]
    counts = shares(tuple(weights))
    cycle, offset = divmod(cursor, sum(counts))
    begun = _cycle(counts, seed, cycle)[:offset]
    return [cycle * count + begun.count(source) for source, count in enumerate(counts)]


@lru_cache(maxsize=16)
def _cycle(counts: tuple[int, ...], seed: int, number: int) -> list[int]:
    order = [source for source, count in enumerate(counts) for _ in range(count)]
    random.Random(f"{seed}/mix/{number}").shuffle(order)
    return order


def position(draw: int, *, stored: int, complete: bool, block: int, key: str) -> int | None:
    """The position of a source's draw; None while the source does not have that task yet.

    `stored` tasks are there; `complete`: there will be no more. `block` 1 keeps the source's own order in all passes.
    """
    number, offset = divmod(draw, stored) if complete else (0, draw)
    if number:
        return offset if block == 1 else shuffled(offset, stored, f"{key}/{number}")
    start = offset - offset % block
    size = min(block, stored - start) if complete else block
    if start + size > stored:
        return None
    return start + shuffled(offset - start, size, f"{key}/0/{start}")


def rising(draw: int, *, stored: int, width: float, over: int, key: str) -> tuple[int, int]:
    """The pass and the position of a draw. The source has `stored` tasks in ascending order, and no more will come.

    The first `over` draws, pass 0, are from a window of w = ⌈width · stored⌉ tasks. It begins at the task nearest to
    (stored − w) · draw / (over − 1): at the first draw it has the w easiest tasks, at the last one the w hardest.
    Each draw takes any task of its window, by a keyed hash. Later passes shuffle all tasks.
    """
    if draw >= over:
        number, offset = divmod(draw - over, stored)
        return number + 1, shuffled(offset, stored, f"{key}/{number + 1}")
    size = min(stored, max(1, math.ceil(width * stored - 1e-9)))
    start = (2 * (stored - size) * draw + over - 1) // max(1, 2 * (over - 1))
    digest = blake2b(f"{key}/window/{draw}".encode(), digest_size=8).digest()
    return 0, start + int.from_bytes(digest, "little") % size


def shuffled(index: int, size: int, key: str) -> int:
    """The image of `index` under a keyed permutation of range(size), in constant memory.

    A Feistel network over the smallest even number of bits that holds `size`, repeated until the result is in range.
    """
    assert 0 <= index < size
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            digest = blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index
