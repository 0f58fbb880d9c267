"""The batch of a step as rows: its groups with their episodes, and its trajectories. No token arrays."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from agentrl.domain.schemas import Json, StepState
from agentrl.store.tables import groups, step_trajectories, steps, tasks, trajectories
from agentrl.store.training import batch_facts
from agentrl.store.views.results import group_episodes

MOST_GROUPS, MOST_PATHS, MOST_EARLIER = 256, 4096, 2048
"""Rows of one step that are read."""


def paths(conn: Connection, step: Row[Any]) -> list[Json]:
    """The trajectories that the step leased or trains once more, by group; the trained ones with their advantage."""
    t, of_step = trajectories.c, step_trajectories.c
    on = (of_step.trajectory_id == t.id) & (of_step.step_id == step.id)
    rolled_back = step.state == StepState.ROLLED_BACK  # its trajectories are free again: only trained ones are known
    query = (
        select(
            t.id, t.session_id, t.group_id, t.state, t.reason, t.tokens, t.trainable_tokens, t.min_version,
            t.max_version, t["return"].label("return_"), of_step.advantage, of_step.staleness_max,
            of_step.staleness_mean, of_step.tokens_trained,
        )
        .join(step_trajectories, on, isouter=not rolled_back)
        .order_by(t.group_id, t.id)
        .limit(MOST_PATHS)
    )  # fmt: skip
    of_this = query.where(of_step.step_id == step.id if rolled_back else batch_facts.in_batch(step.id))
    return [dict(row._mapping) for row in conn.execute(of_this)]


def members(conn: Connection, step: Row[Any]) -> list[Json]:
    """The groups of the step, oldest first, with their task's data and their episodes (`group_episodes`)."""
    g = groups.c
    rows = conn.execute(
        select(
            g.id, g.state, g.reject_reason, g.size, g.missing, g.name, g.task_id, g.cursor, g.external, g.created_at,
            func.coalesce(tasks.c.data, g.task).label("task"),
        )
        .outerjoin(tasks, tasks.c.id == g.task_id)
        .where(g.id.in_(_group_ids(step)))
        .order_by(g.id)
        .limit(MOST_GROUPS)
    )  # fmt: skip
    found = [dict(row._mapping) for row in rows]
    episodes = group_episodes.of_groups(conn, [one["id"] for one in found])
    return [one | {"episodes": episodes[one["id"]]} for one in found]


def _group_ids(step: Row[Any]) -> Select[Any]:
    if step.state != StepState.ROLLED_BACK:
        return select(trajectories.c.group_id).where(batch_facts.in_batch(step.id))
    return (
        select(trajectories.c.group_id)
        .join(step_trajectories, step_trajectories.c.trajectory_id == trajectories.c.id)
        .where(step_trajectories.c.step_id == step.id)
    )


def earlier(conn: Connection, step: Row[Any], of_groups: list[Json]) -> dict[str, Json]:
    """Group → the latest group of the same task that an earlier step trained: its id, and that step."""
    wanted = {one["task_id"]: one for one in of_groups if one["task_id"] is not None}
    if not wanted:
        return {}
    rows = conn.execute(
        select(groups.c.task_id, groups.c.id, steps.c.step)
        .join(trajectories, trajectories.c.group_id == groups.c.id)
        .join(steps, steps.c.id == trajectories.c.lease_step_id)
        .where(
            groups.c.task_id.in_(list(wanted)),
            groups.c.id < max(one["id"] for one in of_groups),
            steps.c.step < step.step,
            steps.c.state != StepState.ROLLED_BACK,
        )
        .distinct()
        .order_by(groups.c.id.desc())
        .limit(MOST_EARLIER)
    )
    found: dict[str, Json] = {}
    for row in rows:
        found.setdefault(wanted[row.task_id]["id"], {"group": row.id, "step": row.step})
    return found
