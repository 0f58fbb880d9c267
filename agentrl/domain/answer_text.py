"""The answer of an episode, as it is stored with its session: a short text that equals that of the same answer."""

from __future__ import annotations

from hashlib import blake2b

LONGEST = 500
"""Characters of a stored answer."""
KEPT = 400
"""Characters that are kept of a longer one; a digest of the whole follows."""


def bounded(answer: str | float | None) -> str | None:
    """The answer with single spaces, at most LONGEST characters long; None if nothing is left.

    Of a longer answer the beginning and a digest are kept, so two answers are equal if and only if their texts are.
    """
    if answer is None:
        return None
    text = " ".join(str(answer).replace("\0", " ").encode(errors="replace").decode().split())
    if len(text) > LONGEST:
        return f"{text[:KEPT]}… {blake2b(text.encode(), digest_size=16).hexdigest()}"
    return text or None
