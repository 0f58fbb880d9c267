"""Where a session stands: its group's other sessions, its task, and what became of its trajectories."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.errors import no_session
from agentrl.store.tables import groups, sessions, step_trajectories, steps, tasks, trajectories

MOST_IN_GROUP, MOST_TRAJECTORIES = 256, 500


def of_session(conn: Connection, session_id: str) -> Json:
    """The session's row, its group with the root sessions in it, and its trajectories. Raises RequestError 404."""
    row = conn.execute(
        select(
            sessions,
            groups.c.state.label("group_state"),
            groups.c.task_id,
            groups.c.task,
            tasks.c.position,
            tasks.c.data,
        )
        .join(groups, groups.c.id == sessions.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(sessions.c.id == session_id)
    ).first()
    if row is None:
        raise no_session(session_id)
    return {
        "id": row.id,
        "group_id": row.group_id,
        "group_state": row.group_state,
        "task_id": row.task_id,
        "task_position": row.position,
        "task": row.task if row.data is None else row.data,
        "sample_index": row.sample_index,
        "status": row.status,
        "is_eval": row.is_eval,
        "metadata": row.metadata,
        "error": row.error,
        "answer": row.answer,
        "stats": row.stats or {},
        "parent_session_id": row.parent_session_id,
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "built": row.built,
        "group": _group(conn, row),
        "trajectories": of_trajectories(conn, session_id),
    }


def _group(conn: Connection, row: Any) -> list[Json]:
    """The root sessions of the session's group, by sample."""
    found = conn.execute(
        select(sessions.c.id, sessions.c.sample_index, sessions.c.status)
        .where(sessions.c.group_id == row.group_id, sessions.c.parent_session_id.is_(None))
        .order_by(sessions.c.sample_index)
        .limit(MOST_IN_GROUP)
    )
    return [dict(one._mapping) for one in found]


def of_trajectories(conn: Connection, session_id: str) -> list[Json]:
    """The trajectories of a session with the steps that leased and trained them."""
    t, st = trajectories.c, step_trajectories.c
    found = conn.execute(
        select(
            t.id, t.leaf_id, t.tokens, t.trainable_tokens, t.min_version, t.max_version, t.state, t.reason,
            t["return"].label("return_"), t.lease_epoch, steps.c.step, steps.c.version_before, steps.c.version_after,
            steps.c.state.label("step_state"), st.advantage, st.staleness_max, st.staleness_mean, st.tokens_trained,
        )
        .outerjoin(steps, steps.c.id == t.lease_step_id)
        .outerjoin(step_trajectories, (st.trajectory_id == t.id) & (st.step_id == t.lease_step_id))
        .where(t.session_id == session_id)
        .order_by(t.id)
        .limit(MOST_TRAJECTORIES)
    )  # fmt: skip
    return [dict(one._mapping) for one in found]
