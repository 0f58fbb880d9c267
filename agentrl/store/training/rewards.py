"""Rewards: append-only facts. The newest of a (session, call, scope, name) counts; history stays."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from agentrl.configs.proxy_config import MAX_REWARD
from agentrl.domain.schemas import GONE, InteractionStatus, Json, RewardScope
from agentrl.errors import RequestError, did_you_mean, no_session
from agentrl.store.db.codec import new_id
from agentrl.store.tables import groups, interactions, rewards, sessions
from agentrl.store.training import trajectories

MAX_REWARDS = 20_000
"""Maximum number of rewards of one session, superseded ones included."""


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """The stored reward. `applied` is false when the session's group was already leased, trained or closed."""

    reward_id: str
    applied: bool


def add(
    conn: Connection,
    session_id: str,
    *,
    value: float,
    discount: float,
    interaction_id: str | None = None,
    scope: str | None = None,
    name: str = "reward",
    source: str = "agent",
    idempotency_key: str | None = None,
    max_value: float = MAX_REWARD,
) -> RewardAnswer:
    """Append a reward. A repeated idempotency key gets the first answer.

    The default `scope` is `session` without a call and `call` with one; it may also be `branch`. `discount` is the
    run's γ, for the return of trajectories that wait for their lease. Raises RequestError: 404 for an unknown session
    or call, 409 for a call that was not delivered, 422 for a value that is not within ±`max_value` or a scope that does
    not fit.
    """
    if not abs(value) <= max_value:  # also refuses NaN
        raise RequestError(
            422,
            f"reward value must be a finite number of at most ±{max_value:g} (proxy.max_reward), got {value:g}",
            code="invalid_value",
            param="value",
        )
    reach = _scope(scope, interaction_id)
    session = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update(key_share=True)).first()
    if session is None:
        raise no_session(session_id)
    if idempotency_key is not None:
        earlier = conn.execute(
            select(rewards).where(rewards.c.session_id == session_id, rewards.c.idempotency_key == idempotency_key)
        ).first()
        if earlier is not None:
            return RewardAnswer(earlier.id, earlier.applied)
    if interaction_id is not None:
        _check_call(conn, session_id, interaction_id)
    # The group's lock keeps a lease from reading the rewards between this read of its state and the commit.
    group_state = conn.execute(
        select(groups.c.state).where(groups.c.id == session.group_id).with_for_update(key_share=True)
    ).scalar_one()
    applied = session.is_eval or (group_state in ("running", "ready") and session.status not in GONE)
    # The session's lock orders its rewards; clocks of processes may differ. The last one supersedes.
    known = select(func.max(rewards.c.id), func.count()).where(rewards.c.session_id == session_id)
    newest, count = conn.execute(known).one()
    if count >= MAX_REWARDS:
        raise RequestError(403, f"the session has {count} rewards: it takes no more", code="session_limit_reached")
    reward_id = new_id(after=newest)
    conn.execute(
        insert(rewards).values(
            id=reward_id,
            run_id=session.run_id,
            session_id=session_id,
            interaction_id=interaction_id,
            scope=reach,
            name=name,
            value=value,
            source=source,
            idempotency_key=idempotency_key,
            applied=applied,
            created_at=time.time(),
        )
    )
    if applied and session.built and not session.is_eval:
        trajectories.refresh(conn, session_id, discount)
    return RewardAnswer(reward_id, applied)


def _check_call(conn: Connection, session_id: str, interaction_id: str) -> None:
    """Raise RequestError unless the session has delivered this call: only delivered calls are trained."""
    call = conn.execute(
        select(interactions.c.session_id, interactions.c.status).where(interactions.c.id == interaction_id)
    ).first()
    if call is None or call.session_id != session_id:
        message, status, code = f"session {session_id} has no call {interaction_id!r}", 404, "interaction_not_found"
    elif call.status != InteractionStatus.COMPLETE:
        message, status, code = f"call {interaction_id} is {call.status}: not delivered", 409, "interaction_incomplete"
    else:
        return
    raise RequestError(status, message, code=code, param="interaction_id")


def history(conn: Connection, session_id: str) -> list[Json]:
    """Every reward of a session, superseded ones included, oldest first."""
    rows = conn.execute(select(rewards).where(rewards.c.session_id == session_id).order_by(rewards.c.id))
    return [
        {
            "id": row.id,
            "interaction_id": row.interaction_id,
            "scope": row.scope,
            "name": row.name,
            "value": row.value,
            "source": row.source,
            "applied": row.applied,
            "created_at": row.created_at,
        }
        for row in rows
    ]


def _scope(scope: str | None, interaction_id: str | None) -> RewardScope:
    """The reward's scope. Raises RequestError 422 for an unknown scope, or one that does not fit `interaction_id`."""
    if scope is None:
        return RewardScope.SESSION if interaction_id is None else RewardScope.CALL
    if scope not in set(RewardScope):
        raise RequestError(
            422, f"scope: no scope {scope!r}{did_you_mean(scope, RewardScope)}", code="invalid_value", param="scope"
        )
    if (scope == RewardScope.SESSION) != (interaction_id is None):
        needs = "takes no interaction_id" if interaction_id is not None else "needs an interaction_id"
        raise RequestError(422, f"scope: {scope!r} {needs}", code="invalid_value", param="scope")
    return RewardScope(scope)
