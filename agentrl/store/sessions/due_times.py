"""The time of a session's next check (`sessions.due_at`)."""

from __future__ import annotations

from sqlalchemy import Connection, update

from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import sessions


def first_check_at(limits: Limits, owner: str | None, now: float) -> float:
    """The time of a new session's first check."""
    return now + min(limits.silence_s(owner), limits.session_max_s)


def postpone(conn: Connection, session_id: str, at: float) -> None:
    """Check a session no earlier than `at`, whatever it waits for."""
    conn.execute(update(sessions).where(sessions.c.id == session_id, sessions.c.due_at < at).values(due_at=at))


def check_at(conn: Connection, session_id: str, at: float) -> None:
    """Set the time of a session's next check."""
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(due_at=at))
