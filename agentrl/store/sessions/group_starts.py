"""Starts groups: inserts the group and one open session per key."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, insert, select

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.errors import RequestError
from agentrl.store import heartbeats, runs
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import task_skips
from agentrl.store.sessions.due_times import first_check_at
from agentrl.store.sessions.group_admission import admit, closed_run
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.task_success import success_rate
from agentrl.store.tables import groups, sessions, tasks
from agentrl.store.tables import runs as runs_table


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A started group with its task's data. `new` is false where an earlier request with the same key started it.

    `first_index` is the sample index of the first of `session_ids`.
    """

    group_id: str
    task_id: str | None
    task: Json | None
    session_ids: list[str]
    first_index: int = 0
    new: bool = field(default=True, compare=False)
    owner: str | None = field(default=None, compare=False)


def start_group(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    *,
    owner: str | None = None,
    start_digest: str | None = None,
) -> NewGroup:
    """Admit a group for the run's next task that the curriculum does not skip: one session per key hash, or with
    adaptive sizes for as many of the first ones as its task's success rate asks for. The last session is the greedy
    baseline of the others where the run's algorithm needs one. Raises as `admit` does.

    Repeating a `start_digest` returns the group that it started, and takes no new place.
    """
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        return earlier
    cursor, seed = admit(conn, run_id, limits, outside=owner is None)
    cursor, draw = task_skips.next_draw(conn, run_id, cursor, seed, limits.curriculum)
    if (adaptive := limits.adaptive) is not None:
        samples = adaptive.size(success_rate(conn, run_id, draw.task.id, adaptive))
        key_hashes = key_hashes[: samples + limits.greedy_baseline]
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        run_task=draw.task,
        cursor=cursor,
        owner=owner,
        start_digest=start_digest,
        baseline=limits.greedy_baseline,
    )


def start_external(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    task: Json | None,
    metadata: Json,
    *,
    start_digest: str | None = None,
    name: str | None = None,
) -> NewGroup:
    """Admit a group for an outside program that brings its own task: one session per key hash, called `name` if given.

    Raises as `admit` does, and as `check_own_task`.
    """
    check_own_task(limits)
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        return earlier
    cursor, _ = admit(conn, run_id, limits, outside=True)
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        cursor=cursor,
        task=task,
        metadata=metadata,
        external=True,
        start_digest=start_digest,
        name=name,
    )


def start_evaluation(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    task: Json,
    metadata: Json,
    sampling: Json | None,
    *,
    owner: str | None = None,
    start_digest: str | None = None,
) -> NewGroup:
    """Create an evaluation group, which is never trained and never counted by admission.

    Raises RequestError: 409 `claimed` when the `start_digest` was used before by another owner, 409 `run_failed`.
    """
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        if earlier.owner != owner:
            raise RequestError(409, f"{earlier.owner} has already claimed it", code="claimed")
        return earlier
    run = runs.get(conn, run_id)
    if run.status == "failed":
        raise closed_run(run)
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        task=task,
        metadata=metadata,
        is_eval=True,
        sampling=sampling,
        owner=owner,
        start_digest=start_digest,
    )


def _insert_group(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    *,
    run_task: Any = None,
    cursor: int | None = None,
    task: Json | None = None,
    metadata: Json | None = None,
    is_eval: bool = False,
    external: bool = False,
    sampling: Json | None = None,
    owner: str | None = None,
    start_digest: str | None = None,
    name: str | None = None,
    baseline: bool = False,
) -> NewGroup:
    """Insert a group with one session per key. Its task is the run's (`run_task`, `cursor`) or its own (`task`).
    `baseline` says that the last session is the greedy one.
    """
    now, group_id = time.time(), new_id()
    task_id = None if run_task is None else run_task.id
    conn.execute(
        insert(groups).values(
            id=group_id,
            run_id=run_id,
            task_id=task_id,
            cursor=cursor,
            task=task,
            size=len(key_hashes),
            is_eval=is_eval,
            external=external,
            state="running",
            sampling=sampling,
            owner=owner,
            start_digest=start_digest,
            created_at=now,
        )
    )
    session_ids = insert_sessions(
        conn,
        run_id,
        group_id,
        limits,
        key_hashes,
        metadata or {},
        is_eval=is_eval,
        owner=owner,
        name=name,
        baseline=baseline,
    )
    if owner is not None:  # a worker that starts a group is alive, even before its first heartbeat
        heartbeats.beat(conn, run_id, "worker", owner)
    return NewGroup(group_id, task_id, task if run_task is None else run_task.data, session_ids)


def insert_sessions(
    conn: Connection,
    run_id: str,
    group_id: str,
    limits: Limits,
    key_hashes: list[str],
    metadata: Json,
    *,
    is_eval: bool = False,
    owner: str | None = None,
    name: str | None = None,
    first_index: int = 0,
    baseline: bool = False,
) -> list[str]:
    """Insert one open session per key into a group, numbered from `first_index`; returns their ids. With `baseline` the
    last one is the greedy baseline of the others.
    """
    now, session_ids = time.time(), [new_id() for _ in key_hashes]
    conn.execute(
        insert(sessions),
        [
            {
                "id": session_id,
                "run_id": run_id,
                "group_id": group_id,
                "sample_index": i,
                "key_hash": key_hash,
                "status": SessionStatus.OPEN,
                "seq": 0,
                "is_eval": is_eval,
                "is_baseline": baseline and i == first_index + len(key_hashes) - 1,
                "built": False,
                "metadata": metadata,
                "name": name,
                "created_at": now,
                "last_seen_at": now,
                "due_at": first_check_at(limits, owner, now),
            }
            for i, (session_id, key_hash) in enumerate(zip(session_ids, key_hashes, strict=True), first_index)
        ],
    )
    return session_ids


def check_own_task(limits: Limits) -> None:
    """Raise RequestError 409 where a program may not bring its own task: a group needs a greedy episode that the proxy
    opens with it.
    """
    if limits.greedy_baseline:
        message = (
            "trainer.algorithm.baseline: greedy needs a greedy episode in each group, which only groups of the run's "
            "own tasks have: start them with POST /groups"
        )
        raise RequestError(409, message, code="needs_greedy_episode")


def lock_run(conn: Connection, run_id: str) -> None:
    """Lock the run: of starts that do this first, one runs after the other, and sees what the earlier one started."""
    conn.execute(select(runs_table.c.id).where(runs_table.c.id == run_id).with_for_update(key_share=True))


def _started(conn: Connection, run_id: str, start_digest: str | None) -> NewGroup | None:
    """The group that this idempotency key started before. The run's row lock serializes repeated requests."""
    if start_digest is None:
        return None
    lock_run(conn, run_id)
    group = conn.execute(
        select(groups, tasks.c.data)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, groups.c.start_digest == start_digest)
    ).first()
    if group is None:
        return None
    of_group = select(sessions.c.id).where(sessions.c.group_id == group.id, sessions.c.parent_session_id.is_(None))
    ids = list(conn.execute(of_group.order_by(sessions.c.sample_index)).scalars())
    data = group.data if group.task_id else group.task
    return NewGroup(group.id, group.task_id, data, ids, new=False, owner=group.owner)
