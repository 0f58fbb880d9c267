"""What a session has used so far, for its limits."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from agentrl.tables import interactions, sessions


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls that began, tokens sampled in those that were answered, and the session's sequence number with them."""

    seq: int
    calls: int
    tokens: int


def of_session(conn: Connection, session_id: str) -> Usage:
    """In one statement, so that the figures belong together; nothing for a session that there is not."""
    row = conn.execute(
        select(
            sessions.c.seq,
            func.count(interactions.c.id).label("calls"),
            func.coalesce(func.sum(interactions.c.output_tokens), 0).label("tokens"),
        )
        .outerjoin(interactions, interactions.c.session_id == sessions.c.id)
        .where(sessions.c.id == session_id)
        .group_by(sessions.c.id, sessions.c.seq)
    ).first()
    return Usage(0, 0, 0) if row is None else Usage(row.seq, row.calls, int(row.tokens))
