"""Groups that outside programs fill: sessions start one by one, at any replica, and name their group.

    first start ─► running, places free ─► running, full ─► ready or rejected
                        └─ missing places given up (ends/missing_places.py) ─┘

The first start of a name creates the group and is admitted; the others join it without admission. A group with free
places has `due_at`; a full one has not.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import runs
from agentrl.store.db.codec import new_id
from agentrl.store.sessions.group_admission import admit, closed_run
from agentrl.store.sessions.group_starts import NewGroup, check_own_task, insert_sessions, lock_run
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock_group
from agentrl.store.tables import groups, sessions

CLOSED = ("finished", "failed")
"""States of a run in which a session no longer joins a group."""


def start_in_group(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hash: str,
    name: str,
    size: int,
    task: Json | None,
    metadata: Json,
) -> NewGroup:
    """Start a session of the group `name`, which the first start creates with `size` places and its task.

    Repeating a `key_hash` returns the session that it opened. Raises RequestError: for a new group as `admit` does;
    409 `group_differs` for another size or task than the first start's, `group_full`, `group_closed` once its missing
    places were given up, `run_finished`, `run_failed`; as `check_own_task` does.
    """
    check_own_task(limits)
    group_id = _id_of(conn, run_id, name)
    if group_id is None:
        lock_run(conn, run_id)
        group_id = _id_of(conn, run_id, name)
    if group_id is None:
        return _create(conn, run_id, limits, key_hash, name, size, task, metadata)
    group = lock_group(conn, group_id)
    of_group = (sessions.c.group_id == group_id, sessions.c.parent_session_id.is_(None))
    earlier = conn.execute(
        select(sessions.c.id, sessions.c.sample_index).where(*of_group, sessions.c.key_hash == key_hash)
    ).first()
    if earlier is not None:
        return NewGroup(group_id, None, group.task, [earlier.id], earlier.sample_index, new=False)
    _check_place(conn, group, size, task, limits)
    index = conn.execute(select(func.count()).select_from(sessions).where(*of_group)).scalar_one()
    ids = insert_sessions(conn, run_id, group_id, limits, [key_hash], metadata, first_index=index)
    conn.execute(update(groups).where(groups.c.id == group_id).values(due_at=_due_at(limits, size - index - 1)))
    return NewGroup(group_id, None, group.task, ids, index)


def _id_of(conn: Connection, run_id: str, name: str) -> str | None:
    return conn.execute(select(groups.c.id).where(groups.c.run_id == run_id, groups.c.name == name)).scalar()


def _due_at(limits: Limits, free: int) -> float | None:
    """When a group with so many free places is checked next."""
    return time.time() + limits.session_timeout_s if free else None


def _create(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hash: str,
    name: str,
    size: int,
    task: Json | None,
    metadata: Json,
) -> NewGroup:
    cursor, _ = admit(conn, run_id, limits, outside=True)
    group_id = new_id()
    conn.execute(
        insert(groups).values(
            id=group_id,
            run_id=run_id,
            cursor=cursor,
            task=task,
            size=size,
            name=name,
            due_at=_due_at(limits, size - 1),
            is_eval=False,
            external=True,
            state="running",
            created_at=time.time(),
        )
    )
    return NewGroup(group_id, None, task, insert_sessions(conn, run_id, group_id, limits, [key_hash], metadata))


def _check_place(conn: Connection, group: Row[Any], size: int, task: Json | None, limits: Limits) -> None:
    """Raise RequestError 409 unless a session of this size and task may join the group."""
    if size != group.size:
        message = f"group {group.name!r} has group_size {group.size}, not {size}: every start of it gives the same"
        raise RequestError(409, message, code="group_differs", param="group_size")
    if task != group.task:
        message = f"group {group.name!r} has another task: all sessions of a group have the first one's task"
        raise RequestError(409, message, code="group_differs", param="task")
    if group.missing:
        message = (
            f"group {group.name!r} takes no more sessions: {size - group.missing} of {size} had started and ended when "
            f"no other joined for {limits.session_timeout_s:g} s (proxy.session_timeout_s)"
        )
        raise RequestError(409, message, code="group_closed", param="group")
    if group.due_at is None:
        message = f"group {group.name!r} is full: it has its {size} sessions (group_size)"
        raise RequestError(409, message, code="group_full", param="group")
    run = runs.get(conn, group.run_id)
    if run.status in CLOSED:
        raise closed_run(run)
