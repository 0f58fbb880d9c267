"""Summarizes rejected calls: how often, the message, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.doctor.words import count
from agentrl.domain.schemas import Json
from agentrl.store.events import REFUSALS_KEPT
from agentrl.visible import visible

MOST = 5
"""Maximum number of kinds to list."""
_TODO = {
    "model_not_found": "name it 'default'",
    "context_length_exceeded": "ask for fewer tokens (max_tokens), or shorten the conversation",
    "unsupported_parameter": "leave it out",
}


def lines(refusals: Sequence[Json]) -> list[str]:
    """One line per kind of refusal, the most frequent first."""
    kinds = Counter((one["status"], one["code"], one["message"]) for one in refusals)
    found = []
    for (status, code, message), n in kinds.most_common(MOST):
        many = len(refusals) >= REFUSALS_KEPT and n > 1
        how_often = f"{count(n, 'call')}{' or more' if many else ''} {'was' if n == 1 else 'were'} refused"
        todo = f": {_TODO[code]}" if code in _TODO else ""
        found.append(f"{how_often} ({status}): {visible(message)}{todo}")
    if len(kinds) > MOST:
        found.append(f"{len(kinds) - MOST} more kinds of refusals; --json has them all")
    return found
