"""Lists of ids in SQL, divided: a statement takes a limited number of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_IDS = 10_000
"""Ids in one list. A statement with three such lists stays below the 32,766 parameters of SQLite."""


def parts(ids: Iterable[str]) -> Iterator[list[str]]:
    """The ids, in their order, in lists of at most MOST_IDS."""
    listed = list(ids)
    for start in range(0, len(listed), MOST_IDS):
        yield listed[start : start + MOST_IDS]
