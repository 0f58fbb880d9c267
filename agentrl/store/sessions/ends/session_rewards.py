"""Rewards of sessions: appends a reward, and settles a session that was waiting for one."""

from __future__ import annotations

from sqlalchemy import Connection

from agentrl.domain.schemas import SessionStatus
from agentrl.store import family
from agentrl.store.db import codec
from agentrl.store.sessions.ends.settling import settle
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock, lock_all
from agentrl.store.training import rewards
from agentrl.store.training.rewards import RewardAnswer


def reward(
    conn: Connection,
    session_id: str,
    limits: Limits,
    *,
    value: float,
    interaction_id: str | None = None,
    scope: str | None = None,
    name: str = "reward",
    source: str = "agent",
    idempotency_key: str | None = None,
) -> RewardAnswer:
    """Append a reward, and settle the session if it has ended and was waiting for one. Raises as `rewards.add` does.

    `interaction_id` may be a response's id, as the caller's dialect spells it: `chatcmpl-…`, `resp_…`, `msg_…`.
    """
    row = lock(conn, session_id)
    waiting = row.status != SessionStatus.OPEN and not row.built
    if waiting:  # the sessions that may be settled with it are locked before the group
        lock_all(conn, family.ids_below(conn, session_id))
    answer = rewards.add(
        conn,
        session_id,
        value=value,
        discount=limits.turn_discount,
        scope=scope,
        max_value=limits.max_reward,
        interaction_id=None if interaction_id is None else codec.call_id(interaction_id),
        name=name,
        source=source,
        idempotency_key=idempotency_key,
    )
    if waiting:
        settle(conn, session_id, limits)
    return answer
