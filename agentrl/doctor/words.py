"""Text for people."""

from __future__ import annotations


def visible(text: str) -> str:
    """Text with control characters spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def count(n: int, what: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
