"""Finds sessions: by id, by key, by owner."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import SessionStatus
from agentrl.store.tables import groups, sessions


def get(conn: Connection, session_id: str) -> Row[Any] | None:
    """One session with its group's sampling overrides."""
    return conn.execute(
        select(sessions, groups.c.sampling, groups.c.external)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id == session_id)
    ).first()


def by_key_hash(conn: Connection, run_id: str, key_hash: str) -> str | None:
    """The id of the run's session that a key opens."""
    of_key = select(sessions.c.id).where(sessions.c.key_hash == key_hash, sessions.c.run_id == run_id)
    return conn.execute(of_key).scalar()


def run_of(conn: Connection, session_id: str) -> str | None:
    """The run of a session."""
    return conn.execute(select(sessions.c.run_id).where(sessions.c.id == session_id)).scalar()


def open_of_owner(conn: Connection, run_id: str, owner: str) -> list[str]:
    """The open sessions of a worker. A restarted worker ends those that it left when it died."""
    return list(
        conn.execute(
            select(sessions.c.id)
            .join(groups, groups.c.id == sessions.c.group_id)
            .where(groups.c.run_id == run_id, groups.c.owner == owner, groups.c.state == "running")
            .where(sessions.c.status == SessionStatus.OPEN, sessions.c.parent_session_id.is_(None))
        ).scalars()
    )
