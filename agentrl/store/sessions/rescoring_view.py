"""A session as `agentrl replay --rescore` hands it to a judge."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.store.calls import call_traces
from agentrl.store.tables import groups, sessions, tasks
from agentrl.store.training import rewards


def describe(conn: Connection, session_id: str) -> Json:
    """A session as `--rescore` gets it.

    `id`, `group_id`, `sample_index`, `parent_session_id`, `status`, `error`, `metadata`, `task`; `calls`, oldest
    first, each with `id`, `parent_id`, `role`, `status`, `finish_reason`, `system` (the messages before all others),
    `new_messages` (what follows the parent's conversation) and `answer`; `messages`, the whole conversation of the last
    delivered main call with its answer; `rewards`, every reward ever given.
    """
    row = conn.execute(
        select(sessions, groups.c.task, groups.c.task_id, tasks.c.data)
        .join(groups, groups.c.id == sessions.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(sessions.c.id == session_id)
    ).one()
    names = ("id", "parent_id", "role", "status", "finish_reason", "system", "new_messages", "answer")
    calls = [{name: item.get(name) for name in names} for item in call_traces.trace(conn, session_id)]
    return {
        "id": row.id,
        "group_id": row.group_id,
        "sample_index": row.sample_index,
        "parent_session_id": row.parent_session_id,
        "status": row.status,
        "error": row.error,
        "metadata": row.metadata,
        "task": row.data if row.task_id else row.task,
        "calls": calls,
        "messages": _conversation(calls),
        "rewards": rewards.history(conn, session_id),
    }


def newest(conn: Connection, run_id: str, limit: int) -> list[str]:
    """Ids of a run's newest completed sessions, without those of sub-agents and evaluations."""
    found = conn.execute(
        select(sessions.c.id)
        .where(
            sessions.c.run_id == run_id,
            sessions.c.status == SessionStatus.COMPLETED,
            sessions.c.parent_session_id.is_(None),
            sessions.c.is_eval.is_(False),
        )
        .order_by(sessions.c.created_at.desc(), sessions.c.id)
        .limit(limit)
    )
    return list(found.scalars())


def _conversation(calls: Sequence[Json]) -> list[Json]:
    by_id = {call["id"]: call for call in calls}
    node = next((call for call in reversed(calls) if call["role"] == "main" and call["answer"] is not None), None)
    turns: list[Json] = []
    while node is not None:
        turns.append(node)
        node = by_id.get(node["parent_id"])
    system = turns[-1]["system"] if turns else []
    return [*system, *(message for turn in reversed(turns) for message in (*turn["new_messages"], turn["answer"]))]
