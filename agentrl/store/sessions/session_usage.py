"""What a session has used so far, its sub-agents' sessions included, for its limits."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select, update

from agentrl.store.calls.call_outcomes import Outcome, finish
from agentrl.store.tables import interactions, sessions


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls that began, and tokens sampled in those that were answered; other models' as they count them."""

    calls: int
    tokens: int


def of_tree(conn: Connection, root_id: str) -> Usage:
    """The usage of a root session and of all sessions below it; nothing for a session that there is not."""
    c = interactions.c
    of_root = select(sessions.c.id).where(or_(sessions.c.id == root_id, sessions.c.root_session_id == root_id))
    row = conn.execute(
        select(
            func.count().label("calls"), func.coalesce(func.sum(c.output_tokens + c.upstream_tokens), 0).label("tokens")
        ).where(c.session_id.in_(of_root))
    ).one()
    return Usage(row.calls, int(row.tokens))


def finish_upstream(conn: Connection, call_id: str, session_id: str, outcome: Outcome, tokens: int) -> int:
    """`call_outcomes.finish` for a call of another model, which sampled so many tokens by its own account."""
    seq = finish(conn, call_id, session_id, outcome)
    conn.execute(update(interactions).where(interactions.c.id == call_id).values(upstream_tokens=tokens))
    return seq
