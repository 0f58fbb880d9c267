"""The episodes of groups: their returns, their calls over time, their last answers, and the steps that took them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import Json, StepState
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions, sessions, steps, trajectories
from agentrl.store.views import open_episodes

MOST = 8192
LONGEST = 2000
"""Characters of an answer."""


def of_groups(conn: Connection, group_ids: Sequence[str]) -> dict[str, list[Json]]:
    """Group → its episodes in order: id, sample_index, status, error, answer, times, and `return_` (null: none yet)."""
    found: dict[str, list[Json]] = {group_id: [] for group_id in group_ids}
    if not found:
        return found
    s = sessions.c
    returns = _returns(conn, group_ids)
    rows = conn.execute(
        select(
            s.id, s.group_id, s.sample_index, s.status, s.is_eval, s.error, s.answer, s.created_at, s.last_seen_at,
            s.ended_at,
        )
        .where(s.group_id.in_(group_ids), s.parent_session_id.is_(None))
        .order_by(s.group_id, s.sample_index)
        .limit(MOST)
    )  # fmt: skip
    for row in rows:
        found[row.group_id].append(dict(row._mapping) | {"return_": returns.get(row.id)})
    return found


def _returns(conn: Connection, group_ids: Sequence[str]) -> dict[str, float | None]:
    """Session → the return of its episode."""
    t = trajectories.c
    rows = conn.execute(
        select(t.session_id, func.max(t["return"])).where(t.group_id.in_(group_ids)).group_by(t.session_id).limit(MOST)
    )
    return {row[0]: row[1] for row in rows}


def lanes(conn: Connection, group_ids: Sequence[str], most: int) -> list[Json]:
    """The oldest `most` episodes of groups with their calls, as `open_episodes.lanes` gives them."""
    s = sessions.c
    rows = conn.execute(
        select(s.id, s.status, s.is_eval, s.created_at, s.last_seen_at, s.ended_at)
        .where(s.group_id.in_(group_ids), s.parent_session_id.is_(None))
        .order_by(s.id)
        .limit(most)
    ).all()
    return open_episodes.lanes(conn, [dict(row._mapping) for row in rows])


def step_of(conn: Connection, group_ids: Sequence[str]) -> dict[str, int]:
    """Group → the surviving step that leased or trained it."""
    rows = conn.execute(
        select(trajectories.c.group_id, func.max(steps.c.step))
        .join(steps, steps.c.id == trajectories.c.lease_step_id)
        .where(trajectories.c.group_id.in_(group_ids), steps.c.state != StepState.ROLLED_BACK)
        .group_by(trajectories.c.group_id)
    )
    return {row[0]: row[1] for row in rows}


def last_words(conn: Connection, session_ids: Sequence[str]) -> Mapping[str, str]:
    """Session → the text of the last answer that its agent got, bounded; sessions without one are left out."""
    c = interactions.c
    newest = (
        select(func.max(c.id))
        .where(c.session_id.in_(session_ids), c.status == "complete", c.role == "main")
        .group_by(c.session_id)
    )
    rows = conn.execute(
        select(c.session_id, interaction_data.c.answer)
        .join(interaction_data, interaction_data.c.interaction_id == c.id)
        .where(c.id.in_(list(conn.execute(newest).scalars())))
    )
    return {row.session_id: _text(codec.unpack_json(row.answer)) for row in rows}


def _text(answer: Json) -> str:
    content = answer.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [call.get("function", {}) for call in answer.get("tool_calls") or [] if isinstance(call, dict)]
    named = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join([str(content or ""), *named]).strip()[:LONGEST]
