"""What an upstream answered in the completed sessions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from agentrl.domain.schemas import InteractionStatus, Json, Role, SessionStatus
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions, sessions
from agentrl.store.training import returns


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamAnswer:
    """A call of an upstream. `answer` is its JSON, or `{"events": […]}` of a stream, in its dialect."""

    call_id: str
    session_id: str
    group_id: str
    dialect: str
    tools: Any
    messages: list[Json]
    answer: Json
    reward: float  # all rewards of the session


def ids(conn: Connection, run_id: str, upstream: str) -> list[str]:
    """The calls that an upstream of this name answered outside evaluations, by group and session, oldest first."""
    c = interactions.c
    return list(
        conn.execute(
            select(c.id)
            .join(sessions, sessions.c.id == c.session_id)
            .where(
                c.run_id == run_id,
                c.role == Role.UPSTREAM,
                c.status == InteractionStatus.COMPLETE,
                c.options["upstream"].as_string() == upstream,
                sessions.c.status == SessionStatus.COMPLETED,
                sessions.c.is_eval.is_(False),
            )
            .order_by(sessions.c.group_id, c.session_id, c.seq)
        ).scalars()
    )


def read(conn: Connection, call_ids: Sequence[str]) -> list[UpstreamAnswer]:
    """The answers of these calls, in their order."""
    c = interactions.c
    rows = conn.execute(
        select(
            c.id,
            c.session_id,
            sessions.c.group_id,
            c.dialect,
            c.tools_hash,
            interaction_data.c.new_messages,
            interaction_data.c.answer,
        )
        .join(interaction_data, interaction_data.c.interaction_id == c.id)
        .join(sessions, sessions.c.id == c.session_id)
        .where(c.id.in_(call_ids))
    ).all()
    found = {row.id: row for row in rows}
    shared = load_contents(conn, {row.tools_hash for row in rows if row.tools_hash is not None})
    rewards = returns.applied(conn, sorted({row.session_id for row in rows}))
    return [
        UpstreamAnswer(
            call_id=row.id,
            session_id=row.session_id,
            group_id=row.group_id,
            dialect=row.dialect,
            tools=shared.get(row.tools_hash),
            messages=codec.unpack_json(row.new_messages),
            answer=codec.unpack_json(row.answer),
            reward=rewards[row.session_id].total,
        )
        for row in (found[call_id] for call_id in call_ids if call_id in found)
    ]
