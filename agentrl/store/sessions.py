"""Groups and sessions: how they are admitted, and how they end.

A group is `running` until each of its sessions is built; then it is `ready` (enough sessions can be trained) or
`rejected` (it gives its admission back). Evaluation groups are `evaluated` and never touch admission.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from agentrl.errors import RequestError
from agentrl.schemas import InteractionStatus, Json, SessionStatus, TrajectoryState
from agentrl.staleness import capacity
from agentrl.store import rewards, runs, trajectories
from agentrl.store.codec import new_id
from agentrl.tables import groups, interactions, sessions
from agentrl.tables import rewards as rewards_table
from agentrl.tables import runs as runs_table
from agentrl.tables import trajectories as trajectories_table

RETRY_AFTER_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The part of a run's configuration that admission and session ends need."""

    group_size: int
    min_group_size: int
    max_concurrent_groups: int
    max_staleness: int
    groups_per_step: int
    reward_timeout_s: float
    end_grace_s: float
    session_timeout_s: float


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group that was just created, with its task's data."""

    group_id: str
    task_id: str | None
    task: Json | None
    session_ids: list[str]


def admit(conn: Connection, run_id: str, limits: Limits) -> tuple[int, int]:
    """Take one place for a group and one position of the data cursor, by one conditional UPDATE.

    Returns (cursor, seed). Raises RequestError: 409 `run_finished`, 429 while staleness or concurrency forbid more.
    """
    run = runs.get(conn, run_id)
    if run.status != "running":
        raise RequestError(409, f"run {run.name} is {run.status}: it takes no more groups", code=f"run_{run.status}")
    bound = capacity(
        max_staleness=limits.max_staleness,
        published_step=run.published_step,
        groups_per_step=limits.groups_per_step,
        target_steps=run.target_steps,
    )
    cursor = conn.execute(
        update(runs_table)
        .where(
            runs_table.c.id == run_id,
            runs_table.c.published_step == run.published_step,
            runs_table.c.admitted - runs_table.c.returned < bound,
            runs_table.c.running < limits.max_concurrent_groups,
        )
        .values(
            admitted=runs_table.c.admitted + 1,
            running=runs_table.c.running + 1,
            data_cursor=runs_table.c.data_cursor + 1,
        )
        .returning(runs_table.c.data_cursor)
    ).scalar_one_or_none()
    if cursor is None:
        raise RequestError(
            429, "no capacity for another group: the trainer must catch up", code="no_capacity",
            retry_after_s=RETRY_AFTER_S,
        )  # fmt: skip
    return int(cursor) - 1, int(run.seed)


def start_group(
    conn: Connection, run_id: str, limits: Limits, key_hashes: list[str], owner: str | None = None
) -> NewGroup:
    """Admit a group for the run's next task: one session per key hash. Raises as `admit` does."""
    cursor, seed = admit(conn, run_id, limits)
    task = runs.task_at(conn, run_id, cursor, seed)
    return _insert_group(
        conn, run_id, key_hashes, task_id=task.id, cursor=cursor, task=None, data=task.data, metadata={}, owner=owner
    )


def start_external(
    conn: Connection, run_id: str, limits: Limits, key_hash: str, task: Json | None, metadata: Json
) -> NewGroup:
    """Admit a group of one for an outside program that brings its own task. Raises as `admit` does."""
    cursor, _ = admit(conn, run_id, limits)
    return _insert_group(
        conn, run_id, [key_hash], task_id=None, cursor=cursor, task=task, data=task, metadata=metadata, external=True
    )


def start_evaluation(
    conn: Connection,
    run_id: str,
    key_hashes: list[str],
    task: Json,
    metadata: Json,
    sampling: Json | None,
    owner: str | None = None,
) -> NewGroup:
    """Create a group that is never trained and never counted."""
    return _insert_group(
        conn, run_id, key_hashes, task_id=None, cursor=None, task=task, data=task, metadata=metadata,
        is_eval=True, sampling=sampling, owner=owner,
    )  # fmt: skip


def _insert_group(
    conn: Connection, run_id: str, key_hashes: list[str], *, task_id: str | None, cursor: int | None,
    task: Json | None, data: Json | None, metadata: Json, is_eval: bool = False, external: bool = False,
    sampling: Json | None = None, owner: str | None = None,
) -> NewGroup:  # fmt: skip
    now, group_id = time.time(), new_id()
    conn.execute(
        insert(groups).values(
            id=group_id, run_id=run_id, task_id=task_id, cursor=cursor, task=task, size=len(key_hashes),
            is_eval=is_eval, external=external, state="running", sampling=sampling, owner=owner, created_at=now,
        )
    )  # fmt: skip
    session_ids = [new_id() for _ in key_hashes]
    conn.execute(
        insert(sessions),
        [
            {
                "id": sid, "run_id": run_id, "group_id": group_id, "sample_index": i, "key_hash": key_hash,
                "status": SessionStatus.OPEN, "seq": 0, "is_eval": is_eval, "built": False, "metadata": metadata,
                "created_at": now, "last_seen_at": now,
            }
            for i, (sid, key_hash) in enumerate(zip(session_ids, key_hashes, strict=True))
        ],
    )  # fmt: skip
    return NewGroup(group_id, task_id, data, session_ids)


def get(conn: Connection, session_id: str) -> Row[Any] | None:
    """One session with its group's sampling overrides."""
    return conn.execute(
        select(sessions, groups.c.sampling, groups.c.external)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id == session_id)
    ).first()


def by_key_hash(conn: Connection, key_hash: str) -> str | None:
    """The id of the session that a key opens."""
    return conn.execute(select(sessions.c.id).where(sessions.c.key_hash == key_hash)).scalar()


def end(conn: Connection, session_id: str, status: SessionStatus, error: str | None, limits: Limits) -> str:
    """Seal a session: new calls get 409, running ones may still commit; returns the resulting status.

    Ending twice is harmless: the first end stands. Raises RequestError 404 for an unknown session.
    """
    row = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update()).first()
    if row is None:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    if row.status != SessionStatus.OPEN:
        return str(row.status)
    final = SessionStatus.CLOSING if status == SessionStatus.COMPLETED and _running_calls(conn, session_id) else status
    conn.execute(
        update(sessions).where(sessions.c.id == session_id).values(status=final, error=error, ended_at=time.time())
    )
    return settle(conn, session_id, limits)


def settle(conn: Connection, session_id: str, limits: Limits) -> str:
    """Build the trajectories of an ended session once nothing more can arrive; returns its status."""
    row = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update()).one()
    if row.built or row.status == SessionStatus.OPEN:
        return str(row.status)
    age = time.time() - row.ended_at
    if row.status == SessionStatus.CLOSING:
        if _running_calls(conn, session_id) and age < limits.end_grace_s:
            return str(row.status)
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(status=SessionStatus.COMPLETED))
    status = SessionStatus(row.status) if row.status != SessionStatus.CLOSING else SessionStatus.COMPLETED
    if not row.is_eval and status == SessionStatus.COMPLETED:
        rewarded = rewards.of_sessions(conn, [session_id])[session_id].any
        if not rewarded and age < limits.reward_timeout_s:
            return str(status)
        trajectories.build(conn, row, rewarded=rewarded)
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(built=True))
    _settle_group(conn, row.group_id, limits)
    return str(status)


def _settle_group(conn: Connection, group_id: str, limits: Limits) -> None:
    group = conn.execute(select(groups).where(groups.c.id == group_id).with_for_update()).one()
    unbuilt = conn.execute(
        select(func.count()).select_from(sessions).where(sessions.c.group_id == group_id, sessions.c.built.is_(False))
    ).scalar_one()
    if unbuilt or group.state != "running":
        return
    now = time.time()
    if group.is_eval:
        conn.execute(update(groups).where(groups.c.id == group_id).values(state="evaluated", finished_at=now))
        return
    trainable = conn.execute(
        select(func.count(trajectories_table.c.session_id.distinct())).where(
            trajectories_table.c.group_id == group_id, trajectories_table.c.state == TrajectoryState.READY
        )
    ).scalar_one()
    ready = trainable >= limits.min_group_size
    conn.execute(
        update(groups).where(groups.c.id == group_id).values(state="ready" if ready else "rejected", finished_at=now)
    )
    if not ready:
        conn.execute(
            update(trajectories_table)
            .where(trajectories_table.c.group_id == group_id, trajectories_table.c.state == TrajectoryState.READY)
            .values(state=TrajectoryState.REJECTED, reason="group_too_small")
        )
    conn.execute(
        update(runs_table)
        .where(runs_table.c.id == group.run_id)
        .values(running=runs_table.c.running - 1, returned=runs_table.c.returned + (0 if ready else 1))
    )


def settle_rewarded(conn: Connection, session_id: str, limits: Limits) -> None:
    """A session that ended before its reward came is built now."""
    waiting = conn.execute(
        select(sessions.c.id).where(
            sessions.c.id == session_id, sessions.c.built.is_(False), sessions.c.ended_at.is_not(None)
        )
    ).first()
    if waiting is not None:
        settle(conn, session_id, limits)


def abandon_owned(conn: Connection, run_id: str, owner: str, limits: Limits) -> int:
    """End the open sessions of a worker that died; returns how many. The restarted worker calls this first."""
    orphans = conn.execute(
        select(sessions.c.id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(groups.c.run_id == run_id, groups.c.owner == owner, groups.c.state == "running")
        .where(sessions.c.status == SessionStatus.OPEN)
    ).scalars()
    ids = list(orphans)
    for session_id in ids:
        end(conn, session_id, SessionStatus.ABANDONED, f"its worker {owner} died", limits)
    return len(ids)


def sweep(conn: Connection, run_id: str, limits: Limits) -> int:
    """Abandon open sessions that nobody uses any more and settle ended ones; returns how many were abandoned."""
    now = time.time()
    rows = conn.execute(
        select(sessions.c.id, sessions.c.status, sessions.c.last_seen_at).where(
            sessions.c.run_id == run_id, sessions.c.built.is_(False)
        )
    ).all()
    abandoned = 0
    for row in rows:
        if row.status != SessionStatus.OPEN:
            settle(conn, row.id, limits)
        elif now - row.last_seen_at > limits.session_timeout_s and not _running_calls(conn, row.id):
            end(conn, row.id, SessionStatus.ABANDONED, "nobody used the session any more", limits)
            abandoned += 1
    return abandoned


def evaluations(conn: Connection, run_id: str) -> list[Json]:
    """Ended evaluation sessions with their metadata and reward, oldest first."""
    rows = conn.execute(
        select(sessions.c.id, sessions.c.metadata, sessions.c.status, func.sum(rewards_table.c.value).label("reward"))
        .outerjoin(rewards_table, rewards_table.c.session_id == sessions.c.id)
        .where(
            sessions.c.run_id == run_id,
            sessions.c.is_eval.is_(True),
            sessions.c.status.in_([SessionStatus.COMPLETED, SessionStatus.FAILED]),
        )
        .group_by(sessions.c.id)
        .order_by(sessions.c.id)
    )
    return [
        {**dict(row.metadata), "session_id": row.id, "status": row.status, "reward": float(row.reward or 0.0)}
        for row in rows
    ]


def _running_calls(conn: Connection, session_id: str) -> int:
    return conn.execute(
        select(func.count())
        .select_from(interactions)
        .where(interactions.c.session_id == session_id, interactions.c.status == InteractionStatus.RUNNING)
    ).scalar_one()
