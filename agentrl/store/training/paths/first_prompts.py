"""The messages of the first call of each trajectory, with its task and tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, select

from agentrl.domain.schemas import Json
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import groups, interaction_data, interactions, tasks, trajectories, trajectory_interactions


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPrompt:
    """The conversation that a trajectory begins with; no messages for a text completion."""

    call_id: str
    task: Any
    messages: list[Json]
    tools: list[Json] | None


def read(conn: Connection, trajectory_ids: Sequence[str]) -> dict[str, FirstPrompt]:
    """Trajectory → the prompt of its first call."""
    c, t = interactions.c, trajectory_interactions.c
    first = (
        select(
            t.trajectory_id,
            c.id,
            c.system_hash,
            c.tools_hash,
            interaction_data.c.new_messages,
            case((groups.c.task_id.is_(None), groups.c.task), else_=tasks.c.data).label("task"),
        )
        .join(interactions, c.id == t.interaction_id)
        .join(interaction_data, interaction_data.c.interaction_id == c.id)
        .join(trajectories, trajectories.c.id == t.trajectory_id)
        .join(groups, groups.c.id == trajectories.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(t.position == 0)
    )
    rows = [row for ids in parts(trajectory_ids) for row in conn.execute(first.where(t.trajectory_id.in_(ids)))]
    shared = load_contents(conn, {key for row in rows for key in (row.system_hash, row.tools_hash) if key is not None})
    return {
        row.trajectory_id: FirstPrompt(
            call_id=row.id,
            task=row.task,
            messages=[*(shared.get(row.system_hash) or []), *codec.unpack_json(row.new_messages)],
            tools=shared.get(row.tools_hash),
        )
        for row in rows
    }
