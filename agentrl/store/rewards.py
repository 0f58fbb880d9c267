"""Rewards: append-only facts. The newest of a (session, interaction, name) counts; history stays."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from agentrl.errors import RequestError
from agentrl.schemas import Json
from agentrl.store.codec import new_id
from agentrl.tables import interactions, rewards, sessions, trajectories


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """What `add` did. `applied` is false when the session's trajectories are leased, trained or closed already."""

    reward_id: str
    applied: bool


@dataclass(frozen=True, slots=True)
class SessionRewards:
    """The rewards of a session that count: summed over names, per call and for the whole session."""

    session: float | None
    calls: dict[str, float]

    @property
    def any(self) -> bool:
        """Whether the session was rewarded at all."""
        return self.session is not None or bool(self.calls)


def add(
    conn: Connection, session_id: str, *, value: float, interaction_id: str | None = None, name: str = "reward",
    source: str = "agent", idempotency_key: str | None = None,
) -> RewardAnswer:  # fmt: skip
    """Append a reward. A repeated idempotency key gets the first answer.

    Raises RequestError: 404 for an unknown session or call, 422 for a value that is not finite.
    """
    if not math.isfinite(value):
        raise RequestError(
            422, f"reward value must be a finite number, got {value}", code="invalid_value", param="value"
        )
    session = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update()).first()
    if session is None:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    if idempotency_key is not None:
        earlier = conn.execute(
            select(rewards).where(rewards.c.session_id == session_id, rewards.c.idempotency_key == idempotency_key)
        ).first()
        if earlier is not None:
            return RewardAnswer(earlier.id, earlier.applied)
    if interaction_id is not None:
        owner = conn.execute(select(interactions.c.session_id).where(interactions.c.id == interaction_id)).scalar()
        if owner != session_id:
            raise RequestError(
                404, f"session {session_id} has no call {interaction_id!r}", code="interaction_not_found",
                param="interaction_id",
            )  # fmt: skip
    fixed = conn.execute(
        select(func.count())
        .select_from(trajectories)
        .where(trajectories.c.session_id == session_id, trajectories.c.state != "ready")
    ).scalar_one()
    reward_id, applied = new_id(), fixed == 0
    conn.execute(
        insert(rewards).values(
            id=reward_id, run_id=session.run_id, session_id=session_id, interaction_id=interaction_id, name=name,
            value=value, source=source, idempotency_key=idempotency_key, applied=applied, created_at=time.time(),
        )
    )  # fmt: skip
    return RewardAnswer(reward_id, applied)


def of_sessions(conn: Connection, session_ids: list[str]) -> dict[str, SessionRewards]:
    """The applied rewards that count, for each session."""
    rows = conn.execute(
        select(rewards).where(rewards.c.session_id.in_(session_ids), rewards.c.applied.is_(True)).order_by(rewards.c.id)
    )
    newest: dict[str, dict[tuple[str | None, str], float]] = {sid: {} for sid in session_ids}
    for row in rows:
        newest[row.session_id][row.interaction_id, row.name] = row.value
    return {sid: _collect(values) for sid, values in newest.items()}


def _collect(values: dict[tuple[str | None, str], float]) -> SessionRewards:
    session: float | None = None
    calls: dict[str, float] = {}
    for (interaction_id, _), value in values.items():
        if interaction_id is None:
            session = value + (session or 0.0)
        else:
            calls[interaction_id] = value + calls.get(interaction_id, 0.0)
    return SessionRewards(session, calls)


def history(conn: Connection, session_id: str) -> list[Json]:
    """Every reward a session ever got, oldest first."""
    rows = conn.execute(select(rewards).where(rewards.c.session_id == session_id).order_by(rewards.c.id))
    return [
        {
            "id": row.id, "interaction_id": row.interaction_id, "name": row.name, "value": row.value,
            "source": row.source, "applied": row.applied, "created_at": row.created_at,
        }
        for row in rows
    ]  # fmt: skip
