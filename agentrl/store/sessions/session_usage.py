"""The calls and tokens that a tree of sessions has used so far, for its limits."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select, update

from agentrl.store.calls.call_outcomes import Outcome, finish
from agentrl.store.tables import interactions, sessions


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls begun, and tokens sampled in answered calls; for other models, the number that they report."""

    calls: int
    tokens: int


def of_tree(conn: Connection, root_id: str) -> Usage:
    """The usage of a root session and of all sessions below it; zero for an unknown session."""
    c = interactions.c
    of_root = select(sessions.c.id).where(or_(sessions.c.id == root_id, sessions.c.root_session_id == root_id))
    row = conn.execute(
        select(
            func.count().label("calls"), func.coalesce(func.sum(c.output_tokens + c.upstream_tokens), 0).label("tokens")
        ).where(c.session_id.in_(of_root))
    ).one()
    return Usage(row.calls, int(row.tokens))


def finish_upstream(conn: Connection, call_id: str, session_id: str, outcome: Outcome, tokens: int) -> int:
    """`call_outcomes.finish` for a call of another model, which reports the tokens that it sampled."""
    seq = finish(conn, call_id, session_id, outcome)
    conn.execute(update(interactions).where(interactions.c.id == call_id).values(upstream_tokens=tokens))
    return seq
