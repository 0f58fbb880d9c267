"""When a session is checked next (`sessions.due_at`)."""

from __future__ import annotations

from sqlalchemy import Connection, update

from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import sessions


def first_check_at(limits: Limits, owner: str | None, now: float) -> float:
    return now + min(limits.silence_s(owner), limits.session_max_s)


def postpone(conn: Connection, session_id: str, at: float) -> None:
    """Look at a session no earlier than that, whatever it waits for."""
    conn.execute(update(sessions).where(sessions.c.id == session_id, sessions.c.due_at < at).values(due_at=at))


def check_at(conn: Connection, session_id: str, at: float) -> None:
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(due_at=at))
