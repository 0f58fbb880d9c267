"""Formats counts and lists for messages."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 5


def count(n: int, what: str) -> str:
    """Format a count: `1 call`, `2 calls`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def some(items: Iterable[object]) -> str:
    """Format the first items of a list, and the total if there are more."""
    words = [str(item) for item in items]
    return ", ".join(words[:SHOWN]) + (f", … ({len(words):,} in all)" if len(words) > SHOWN else "")
