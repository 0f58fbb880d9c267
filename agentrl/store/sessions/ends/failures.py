"""Stops a run when its sessions fail one after another.

Root sessions that completed or failed count; abandoned sessions and sub-agents' sessions do not. When a group ends
without a completed session, the newest sessions of the run are examined: those of all workers and outside programs, of
training and evaluation. Greedy episodes (`baseline: greedy`) are also examined by themselves: each that fails rejects
its group, whatever the samples did.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.store import events
from agentrl.store.db.codec import new_id
from agentrl.store.tables import events as events_table
from agentrl.store.tables import groups, sessions
from agentrl.store.tables import runs as runs_table

OfKind = tuple[ColumnElement[bool], ...]
"""What sessions that are examined together have in common."""
STOPPED = "sessions_fail"
"""Kind of the event that says why the run was stopped."""
OPEN = (SessionStatus.OPEN, SessionStatus.CLOSING)
ENDED = (SessionStatus.COMPLETED, SessionStatus.FAILED)
LOOKED_AT = 8
"""Newest ended sessions that must all have failed before progress displays show an error."""
MEMORY = 16
"""A factor: workers' newest sessions are searched among MEMORY times the allowed number of failures."""
QUOTED = 1000
"""Characters of an error that the run's own error quotes."""


def stop_if_all_fail(conn: Connection, run_id: str, group_id: str, most: int | None) -> None:
    """After a group has ended, fail the run if its newest `most` sessions, or greedy episodes, all failed and no older
    one may yet succeed.

    Sessions begun before those, and sessions of workers whose newest session has not failed, may yet succeed. With
    `most` None the run continues. The run's error names the last session and its error.
    """
    if most is None:
        return
    of_run = _of_run(run_id)
    kinds: dict[str, OfKind] = {"sessions": of_run, "greedy episodes": (*of_run, sessions.c.is_baseline.is_(True))}
    for kind, of_kind in kinds.items():
        last = _last_failure(conn, run_id, group_id, of_kind, most)
        if last is None:
            continue
        why = (
            f"{most} {kind} in a row failed (rollout.max_failures_in_a_row); the last, {last.id}: "
            f"{(last.error or 'no error was given')[:QUOTED]}"
        )
        stopped = conn.execute(
            update(runs_table)
            .where(runs_table.c.id == run_id, runs_table.c.status == "running")
            .values(status="failed", error=why, finished_at=time.time())
            .returning(runs_table.c.id)
        ).first()
        if stopped is not None:
            data = {"failures": most, "session_id": last.id, "error": why}
            events.record(conn, run_id, STOPPED, data, "proxy", new_id())
        return


def newest_error(conn: Connection, run_id: str) -> str | None:
    """The newest session's error if the newest LOOKED_AT ended sessions all failed, else None, for displays."""
    newest = _newest(conn, run_id, _of_run(run_id), LOOKED_AT)
    if len(newest) < LOOKED_AT or any(row.status == SessionStatus.COMPLETED for row in newest):
        return None
    return str(newest[0].error or "no error was given")


def _of_run(run_id: str) -> OfKind:
    return sessions.c.run_id == run_id, sessions.c.parent_session_id.is_(None)


def _newest(conn: Connection, run_id: str, of_kind: OfKind, count: int) -> list[Row[Any]]:
    """The newest ended sessions of a kind, newest first."""
    return list(
        conn.execute(
            select(sessions.c.id, sessions.c.status, sessions.c.error, sessions.c.ended_at)
            .where(*of_kind, sessions.c.status.in_(ENDED), sessions.c.id > _reopened(conn, run_id))
            .order_by(sessions.c.id.desc())
            .limit(count)
        )
    )


def _last_failure(conn: Connection, run_id: str, group_id: str, of_kind: OfKind, most: int) -> Row[Any] | None:
    """The session of a kind that ended last, if the group's and the newest `most` all failed and no older one may yet
    succeed.
    """
    of_group = select(sessions.c.status).where(sessions.c.group_id == group_id, *of_kind).distinct()
    statuses = set(conn.execute(of_group).scalars())
    if SessionStatus.FAILED not in statuses or SessionStatus.COMPLETED in statuses:
        return None
    newest = _newest(conn, run_id, of_kind, most)
    if len(newest) < most or any(row.status == SessionStatus.COMPLETED for row in newest):
        return None
    begun = min(row.ended_at for row in newest)
    if _may_succeed(conn, of_kind, newest[-1].id, begun, MEMORY * most):
        return None
    return max(newest, key=lambda row: (row.ended_at, row.id))


def _may_succeed(conn: Connection, of_kind: OfKind, first: str, begun: float, looked_at: int) -> bool:
    """Whether only some workers may be at fault, and other sessions may yet succeed.

    True if a session that began before the failed ones has completed since `begun`, or still runs at a worker. Also
    true if a session runs at a worker whose newest session has not failed.
    """
    earlier = sessions.c.id < first
    during = earlier & (sessions.c.status == SessionStatus.COMPLETED) & (sessions.c.ended_at >= begun)
    failing = _failing_workers(conn, of_kind, looked_at)
    played = sessions.c.status.in_(OPEN) & groups.c.owner.is_not(None) & (earlier | groups.c.owner.not_in(failing))
    found = select(sessions.c.id).join(groups, groups.c.id == sessions.c.group_id).where(*of_kind, during | played)
    return conn.execute(found.limit(1)).first() is not None


def _failing_workers(conn: Connection, of_kind: OfKind, looked_at: int) -> list[str]:
    """Workers whose newest session failed, among the workers of the newest sessions."""
    newest = conn.execute(
        select(groups.c.owner, sessions.c.status)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(*of_kind, sessions.c.status.in_(ENDED), groups.c.owner.is_not(None))
        .order_by(sessions.c.id.desc())
        .limit(looked_at)
    )
    found: dict[str, str] = {}
    for owner, status in newest:
        found.setdefault(owner, status)
    return [owner for owner, status in found.items() if status == SessionStatus.FAILED]


def _reopened(conn: Connection, run_id: str) -> str:
    """The id of the newest event that resumed the run, '' if none; it sorts by time, as session ids do."""
    of_kind = (events_table.c.run_id == run_id, events_table.c.kind == events.REOPENED)
    return conn.execute(select(func.max(events_table.c.id)).where(*of_kind)).scalar() or ""
