"""Gives up the places of a named group that no session took, so that the group can be trained or rejected."""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, select, update

from agentrl.store import events
from agentrl.store.sessions.ends.liveness import due_rows
from agentrl.store.sessions.ends.settling import settle_group
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock_group
from agentrl.store.tables import groups, sessions

UNFILLED = "group_unfilled"
"""Kind of the events that name a group whose missing places were given up."""


def due(conn: Connection, run_id: str, *, skip: int = 0, limit: int = 256) -> list[str]:
    """The groups with free places that some replica should check now, the longest overdue first, after `skip`."""
    return due_rows(conn, groups, run_id, groups.c.due_at.is_not(None), skip=skip, limit=limit)


def postpone(conn: Connection, group_id: str, at: float) -> None:
    """Check a group with free places no earlier than `at`."""
    conn.execute(update(groups).where(groups.c.id == group_id, groups.c.due_at < at).values(due_at=at))


def check_due_group(conn: Connection, group_id: str, limits: Limits, *, heard_since: float) -> bool:
    """Check a group that is due; returns whether its missing places were given up. The first of several replicas acts.

    They are given up when all its sessions are built, and none has started or ended for `session_timeout_s`. As with
    sessions, silence counts from `heard_since` at the earliest.
    """
    group, now = lock_group(conn, group_id), time.time()
    if group.due_at is None or group.due_at > now:  # it was filled, or another replica has checked it
        return False
    of_group = sessions.c.group_id == group_id
    unbuilt = select(func.count()).select_from(sessions).where(of_group, sessions.c.built.is_(False))
    latest = conn.execute(select(func.max(sessions.c.created_at), func.max(sessions.c.ended_at)).where(of_group)).one()
    heard = max(heard_since, group.created_at, *(at for at in latest if at is not None))
    if conn.execute(unbuilt).scalar_one():
        heard = now
    if now < heard + limits.session_timeout_s:
        postpone(conn, group_id, heard + limits.session_timeout_s)
        return False
    roots = select(func.count()).select_from(sessions).where(of_group, sessions.c.parent_session_id.is_(None))
    started = conn.execute(roots).scalar_one()
    conn.execute(update(groups).where(groups.c.id == group_id).values(due_at=None, missing=group.size - started))
    settle_group(conn, group_id, limits)
    fact = {"group_id": group_id, "group": group.name, "started": started, "group_size": group.size}
    events.record(conn, group.run_id, UNFILLED, fact, "proxy")
    return True
