"""Liveness: which sessions are due for a check, and what the check does with a silent one.

Every session that is not built has a `due_at`; any replica's sweep checks the sessions that are due.
"""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, Table, select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import no_session
from agentrl.store import family, heartbeats
from agentrl.store.sessions.due_times import check_at
from agentrl.store.sessions.ends.sealing import end
from agentrl.store.sessions.ends.settling import count_running, settle
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock_in_tree
from agentrl.store.tables import groups, sessions


def touch(conn: Connection, session_id: str) -> str:
    """Record that a session is in use, which delays its abandonment; returns its status. Raises RequestError 404."""
    status = conn.execute(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(last_seen_at=time.time())
        .returning(sessions.c.status)
    ).scalar()
    if status is None:
        raise no_session(session_id)
    return str(status)


def due(conn: Connection, run_id: str, *, skip: int = 0, limit: int = 256) -> list[str]:
    """The sessions that some replica should check now, the longest overdue first, without the first `skip`."""
    return due_rows(conn, sessions, run_id, sessions.c.built.is_(False), skip=skip, limit=limit)


def due_rows(
    conn: Connection, table: Table, run_id: str, condition: ColumnElement[bool], *, skip: int, limit: int
) -> list[str]:
    """The ids of the run's rows that are due and satisfy `condition`, the longest overdue first, after `skip`."""
    return list(
        conn.execute(
            select(table.c.id)
            .where(table.c.run_id == run_id, condition, table.c.due_at <= time.time())
            .order_by(table.c.due_at, table.c.id)
            .offset(skip)
            .limit(limit)
        ).scalars()
    )


def check_due_session(conn: Connection, session_id: str, limits: Limits, *, heard_since: float) -> bool:
    """Check a session that is due; returns whether it was abandoned. Of several replicas, the first one acts.

    An ended session is settled. An open session older than `session_max_s` fails. An open session that is silent, and
    whose worker is silent, is abandoned; it is completed instead if its client opened it by name. Silence counts from
    `heard_since`, the start of the caller's own uninterrupted uptime, so an outage of the proxy or the database ends no
    session. A running call keeps a session alive; an open sub-agent's session keeps its parent alive, and ends with it.
    """
    row = lock_in_tree(conn, session_id)
    if row.built or row.due_at > time.time():  # another replica has checked it
        return False
    if row.status != SessionStatus.OPEN:
        settle(conn, session_id, limits)
        return False
    now = time.time()
    if now >= row.created_at + limits.session_max_s:
        end(conn, session_id, SessionStatus.FAILED, f"it was open for {limits.session_max_s:g} s", limits)
        return False
    owner = conn.execute(select(groups.c.owner).where(groups.c.id == row.group_id)).scalar_one()
    silence_s = limits.silence_s(owner)
    tree = family.load(conn, family.root_of(row))
    below = [member for member in tree.below(session_id) if member.status == SessionStatus.OPEN]
    heard = max(heard_since, *(member.last_seen_at for member in (row, *below)))
    if owner is not None:
        heard = max(heard, heartbeats.last_seen(conn, row.run_id, "worker", owner))
    at_work = count_running(conn, session_id, *(member.id for member in below))
    if now < heard + silence_s or at_work or _is_open(conn, row.parent_session_id):
        next_check = max(heard, now - silence_s / 2) + silence_s
        check_at(conn, session_id, min(next_check, row.created_at + limits.session_max_s))
        return False
    if row.name is not None:  # a client that opens by name may have no other way to end it
        end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        return False
    why = f"its worker {owner} stopped sending heartbeats" if owner else "it was not used for too long"
    end(conn, session_id, SessionStatus.ABANDONED, why, limits)
    return True


def _is_open(conn: Connection, session_id: str | None) -> bool:
    found = select(sessions.c.id).where(sessions.c.id == session_id, sessions.c.status == SessionStatus.OPEN)
    return session_id is not None and conn.execute(found).first() is not None
