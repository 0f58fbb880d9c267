"""Ends sessions: seals a session together with every session below it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, exists, update

from agentrl.domain import answer_text
from agentrl.domain.schemas import GONE, InteractionStatus, SessionStatus
from agentrl.domain.verdicts import EVERYTHING, Verdict
from agentrl.store import family
from agentrl.store.db import codec
from agentrl.store.sessions.ends.settling import settle
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock_all, lock_group, lock_in_tree
from agentrl.store.tables import groups, interactions, sessions
from agentrl.store.training import leases, session_verdicts

PARENT_ENDED = "its parent session ended"
"""The error of a sub-agent's session that was open when its parent ended."""


def end(
    conn: Connection,
    session_id: str,
    status: SessionStatus,
    error: str | None,
    limits: Limits,
    verdict: Verdict = EVERYTHING,
    reject_group: str | None = None,
    *,
    answer: str | None = None,
    stats: Mapping[str, float] | None = None,
) -> str:
    """Seal a session and the sessions below it: new calls get 409, running ones may still commit; returns the status.

    Ending twice is harmless: the first end stands. But a session that still waits for calls or a reward can be
    abandoned. `reject_group` is the reason why no session of the group trains, and counts until a step has leased the
    group; `answer` is what the episode answered, and `stats` are numbers that the agent measured. Raises RequestError
    404 for an unknown session, and 422 for a verdict on calls that it has not made.
    """
    row = lock_in_tree(conn, session_id)
    abandons = status == SessionStatus.ABANDONED and not row.built and row.status not in GONE
    if row.status != SessionStatus.OPEN and not abandons:
        if reject_group is not None:
            _reject(conn, row.run_id, row.group_id, reject_group)
        return str(row.status)
    below = [member.id for member in family.load(conn, family.root_of(row)).below(session_id)]
    lock_all(conn, below)
    error = None if error is None else codec.error_text(error)
    if not abandons:
        session_verdicts.record(conn, session_id, verdict)
        if (kept := answer_text.bounded(answer)) is not None:
            conn.execute(update(sessions).where(sessions.c.id == session_id).values(answer=kept))
    _seal(conn, [session_id], status, error, due_in_s=0.0)
    if below:
        _seal(conn, below, status, PARENT_ENDED, due_in_s=limits.silence_s(None))
    if stats:
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(stats=dict(stats)))
    if reject_group is not None:
        _reject(conn, row.run_id, row.group_id, reject_group)
    return settle(conn, session_id, limits)


def _reject(conn: Connection, run_id: str, group_id: str, reason: str) -> None:
    """Reject a group when it settles, or now if it is ready. One that a step has leased stays as it is."""
    state = lock_group(conn, group_id).state
    if state == "running":
        conn.execute(update(groups).where(groups.c.id == group_id).values(reject_reason=reason))
    elif state == "ready":
        leases.leave_out(conn, run_id, [group_id], reason)


def _seal(conn: Connection, session_ids: list[str], status: SessionStatus, error: str | None, due_in_s: float) -> None:
    """Seal those locked sessions that are open; with ABANDONED, those that are not built."""
    takes: ColumnElement[bool] = sessions.c.status == SessionStatus.OPEN
    final: Any = status
    if status == SessionStatus.ABANDONED:
        takes = and_(sessions.c.built.is_(False), sessions.c.status.not_in(GONE))
    elif status == SessionStatus.COMPLETED:
        runs_still = exists().where(
            interactions.c.session_id == sessions.c.id, interactions.c.status == InteractionStatus.RUNNING
        )
        final = case((runs_still, SessionStatus.CLOSING.value), else_=SessionStatus.COMPLETED.value)
    now = time.time()
    conn.execute(
        update(sessions)
        .where(sessions.c.id.in_(session_ids), takes)
        .values(status=final, error=error, ended_at=now, due_at=now + due_in_s)
    )
