"""The groups of a run whose sessions have all ended and are built, and the sequences of their sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from agentrl.store import runs
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.exports import sampled_paths
from agentrl.store.exports.sampled_paths import SampledPath
from agentrl.store.tables import groups, interactions, sessions
from agentrl.store.training import returns

RUNNING = "running"


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """An ended group."""

    id: str
    is_eval: bool


def page(conn: Connection, run_id: str, after: str, most: int) -> list[EndedGroup]:
    """The first ended groups whose ids sort after `after`."""
    found = conn.execute(
        select(groups.c.id, groups.c.is_eval)
        .where(groups.c.run_id == run_id, groups.c.id > after, groups.c.state != RUNNING)
        .order_by(groups.c.id)
        .limit(most)
    )
    return [EndedGroup(row.id, bool(row.is_eval)) for row in found]


def oldest_running(conn: Connection, run_id: str) -> str | None:
    """The smallest id of a group that has not ended."""
    found: str | None = conn.execute(
        select(func.min(groups.c.id)).where(groups.c.run_id == run_id, groups.c.state == RUNNING)
    ).scalar_one()
    return found


def newest_version(conn: Connection, group_id: str) -> int | None:
    """The newest version that sampled a token of the group; None if it has no sampled token."""
    found: int | None = conn.execute(
        select(func.max(interactions.c.max_version))
        .join(sessions, sessions.c.id == interactions.c.session_id)
        .where(sessions.c.group_id == group_id, *OF_THE_POLICY)
    ).scalar_one()
    return found


def members(conn: Connection, group_id: str) -> list[str]:
    """The ids of the group's sessions, those of sub-agents included."""
    of_group = select(sessions.c.id).where(sessions.c.group_id == group_id).order_by(sessions.c.sample_index)
    return list(conn.execute(of_group).scalars())


def sequences(conn: Connection, session_id: str, most_tokens: int) -> tuple[list[SampledPath], bool]:
    """The paths of a session, with its group's id as their task, and whether all are there.

    Paths after the first `most_tokens` tokens are left out. A session that retention has removed has no paths.
    """
    session: Any = conn.execute(select(sessions).where(sessions.c.id == session_id)).first()
    if session is None:
        return [], True
    config = runs.get(conn, session.run_id).config
    discount = 1.0 if session.is_eval else float((config.get("rollout") or {}).get("turn_discount", 1.0))
    reward = returns.of_sessions(conn, [session_id], discount)[session_id].episode_return
    found: list[SampledPath] = []
    tokens = 0
    for path in sampled_paths.of_session(conn, session, session.group_id, reward):
        tokens += len(path.ids)
        if found and tokens > most_tokens:
            return found, False
        found.append(path)
    return found, True
