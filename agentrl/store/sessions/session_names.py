"""Finds sessions by the names that clients gave them."""

from __future__ import annotations

from sqlalchemy import Connection, or_, select

from agentrl.store.sessions import session_lookup
from agentrl.store.tables import sessions


def find(conn: Connection, run_id: str, named: str) -> str | None:
    """The run's session with this id or, if there is none, with this name."""
    rows = conn.execute(
        select(sessions.c.id).where(sessions.c.run_id == run_id, or_(sessions.c.id == named, sessions.c.name == named))
    )
    found = list(rows.scalars())
    return named if named in found else next(iter(found), None)


def find_child(conn: Connection, run_id: str, parent_id: str, name: str, key_hash: str) -> str | None:
    """The sub-agent's session under `parent_id` that has this id, or that was opened with this key hash."""
    row = session_lookup.get(conn, name)
    if row is not None and row.parent_session_id == parent_id:
        return name
    return session_lookup.by_key_hash(conn, run_id, key_hash)
