"""Text for people."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 5


def count(n: int, what: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def some(items: Iterable[object]) -> str:
    """The first few of a list, and that there are more."""
    words = [str(item) for item in items]
    return ", ".join(words[:SHOWN]) + (f", … ({len(words):,} in all)" if len(words) > SHOWN else "")
