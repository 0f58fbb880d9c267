"""How many heads each rank of a context group attends with, where the ranks do not divide the heads.

Heads are computed independently of each other, so that copies of key/value heads and heads of zeros, whose output is
dropped, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Heads after copying and padding; both totals are multiples of the ranks, and query head i uses key/value head
    i // group.
    """

    queries: int
    keys: int
    copies: int  # of each key/value head, next to each other; zeros follow the last
    ranks: int

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.queries // self.keys

    @classmethod
    def of(cls, queries: int, keys: int, ranks: int) -> Self:
        """The split with the fewest query heads a rank, which is time, then with the fewest key/value heads, which are
        bytes. `queries` is a multiple of `keys`, as grouped queries are.
        """
        assert queries % keys == 0
        size = queries // keys
        return min(
            (
                cls(ranks * each * (size // copies), ranks * each, copies, ranks)
                for copies in range(1, size + 1)
                if size % copies == 0
                for each in [-(-keys * copies // ranks)]
            ),
            key=lambda found: (found.queries, found.keys),
        )
