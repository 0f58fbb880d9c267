"""Some trajectories that a step trained, with what was asked and answered: for a table that people read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select

from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    sessions,
    step_trajectories,
    tasks,
    trajectories,
    trajectory_interactions,
)
from agentrl.store.training import returns

Said = tuple[list[Any], Any, int]
"""The messages of a trajectory's first call, the answer of its last one, and the number of its calls."""
NOTHING: Said = ([], None, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRollout:
    """A trained trajectory. `prompt` are the messages of its first call, `answer` the last call's message."""

    session_id: str
    group_id: str
    task: Any
    prompt: list[Any]
    answer: Any
    calls: int
    reward: float | None  # of the session itself, all names summed; null: none
    episode_return: float | None
    advantage: float
    age: int  # of its oldest trained token, in versions


def read(conn: Connection, step_id: str, count: int) -> list[SampledRollout]:
    """At most `count` trajectories that the step trained, drawn at random; the same ones each time."""
    trained = select(step_trajectories.c.trajectory_id).where(step_trajectories.c.step_id == step_id)
    ids = list(conn.execute(trained.order_by(step_trajectories.c.trajectory_id)).scalars())
    chosen = random.Random(step_id).sample(ids, min(count, len(ids)))
    rows = conn.execute(
        select(
            trajectories.c.id,
            trajectories.c.session_id,
            trajectories.c.group_id,
            trajectories.c["return"].label("episode_return"),
            step_trajectories.c.advantage,
            step_trajectories.c.staleness_max,
            case((groups.c.task_id.is_(None), groups.c.task), else_=tasks.c.data).label("task"),
        )
        .join(step_trajectories, step_trajectories.c.trajectory_id == trajectories.c.id)
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .join(groups, groups.c.id == trajectories.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(step_trajectories.c.step_id == step_id, trajectories.c.id.in_(chosen))
        .order_by(trajectories.c.group_id, trajectories.c.id)
    ).all()
    said = _said(conn, chosen)
    rewarded = returns.applied(conn, [row.session_id for row in rows])
    return [
        SampledRollout(
            session_id=row.session_id,
            group_id=row.group_id,
            task=row.task,
            prompt=said.get(row.id, NOTHING)[0],
            answer=said.get(row.id, NOTHING)[1],
            calls=said.get(row.id, NOTHING)[2],
            reward=rewarded[row.session_id].session,
            episode_return=row.episode_return,
            advantage=row.advantage,
            age=row.staleness_max,
        )
        for row in rows
    ]


def _said(conn: Connection, trajectory_ids: Sequence[str]) -> dict[str, Said]:
    """What was said in trajectories whose calls have messages."""
    t = trajectory_interactions.c
    ends = (
        select(t.trajectory_id, func.min(t.position).label("first"), func.max(t.position).label("last"))
        .where(t.trajectory_id.in_(trajectory_ids))
        .group_by(t.trajectory_id)
        .subquery()
    )
    rows = conn.execute(
        select(
            t.trajectory_id,
            t.position,
            ends.c.first,
            ends.c.last,
            interactions.c.system_hash,
            interaction_data.c.new_messages,
            interaction_data.c.answer,
        )
        .join(ends, (ends.c.trajectory_id == t.trajectory_id) & t.position.in_([ends.c.first, ends.c.last]))
        .join(interactions, interactions.c.id == t.interaction_id)
        .join(interaction_data, interaction_data.c.interaction_id == t.interaction_id)
    ).all()
    shared = load_contents(conn, {row.system_hash for row in rows if row.system_hash is not None})
    prompts: dict[str, list[Any]] = {}
    answers: dict[str, tuple[Any, int]] = {}
    for row in rows:
        if row.position == row.first:
            system = shared.get(row.system_hash) or []
            prompts[row.trajectory_id] = [*system, *codec.unpack_json(row.new_messages)]
        if row.position == row.last:
            answers[row.trajectory_id] = codec.unpack_json(row.answer), row.last - row.first + 1
    return {found: (prompts[found], *answers[found]) for found in prompts}
