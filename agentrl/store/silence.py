"""Decisions about replicas, sessions and groups that have gone silent, each in one transaction.

A decision holds until `valid_until`. If the database delays it longer, nothing is done and the caller decides again.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection

from agentrl.domain.schemas import Json
from agentrl.store import events, heartbeats
from agentrl.store.calls import running_calls
from agentrl.store.sessions import due_times
from agentrl.store.sessions.ends import liveness, missing_places
from agentrl.store.sessions.session_limits import Limits

STUCK = "session_stuck"
"""Kind of the events that name a session which cannot be ended, and why."""
GROUP_STUCK = "group_stuck"
"""Kind of the events that name a group whose missing places cannot be given up, and why."""


def silent_replicas(conn: Connection, run_id: str, since: float) -> list[str]:
    """The proxy replicas with running calls whose last heartbeat is older than `since`."""
    silent = set(heartbeats.silent(conn, run_id, "proxy", since))
    return sorted(silent & running_calls.serving_replicas(conn, run_id)) if silent else []


def declare_replica_lost(conn: Connection, run_id: str, replica: str, silent_since: float, valid_until: float) -> int:
    """Mark the running calls of a silent replica as lost, so that their sessions can end; returns how many.

    Does nothing after `valid_until`, or when the replica has sent a heartbeat since.
    """
    if time.time() > valid_until or heartbeats.last_seen(conn, run_id, "proxy", replica) >= silent_since:
        return 0
    return running_calls.declare_lost(conn, run_id, replica)


def check_session(
    conn: Connection, session_id: str, limits: Limits, heard_since: float, valid_until: float
) -> bool | None:
    """Check a due session. Returns whether it was abandoned; None, without a check, after `valid_until`."""
    if time.time() > valid_until:
        return None
    return liveness.check_due_session(conn, session_id, limits, heard_since=heard_since)


def check_group(conn: Connection, group_id: str, limits: Limits, heard_since: float, valid_until: float) -> bool | None:
    """Check a due group. Returns whether its free places were given up; None, without a check, after `valid_until`."""
    if time.time() > valid_until:
        return None
    return missing_places.check_due_group(conn, group_id, limits, heard_since=heard_since)


def record_stuck(conn: Connection, run_id: str, session_id: str, why: str, replica: str, due_again_at: float) -> None:
    """Record that a session cannot be ended, once per reason, and postpone its next check to `due_again_at`."""
    _record_once(conn, run_id, STUCK, {"session_id": session_id, "error": why}, replica)
    due_times.postpone(conn, session_id, due_again_at)


def record_stuck_group(
    conn: Connection, run_id: str, group_id: str, why: str, replica: str, due_again_at: float
) -> None:
    """Record that a group's check fails, once per reason, and postpone its next check to `due_again_at`."""
    _record_once(conn, run_id, GROUP_STUCK, {"group_id": group_id, "error": why}, replica)
    missing_places.postpone(conn, group_id, due_again_at)


def _record_once(conn: Connection, run_id: str, kind: str, fact: Json, replica: str) -> None:
    if all(event.data != fact for event in events.of_run(conn, run_id, kind)):
        events.record(conn, run_id, kind, fact, replica)
