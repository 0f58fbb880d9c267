"""Running calls: finds them, and closes those that get no answer.

running ──► complete, aborted     `call_outcomes.finish`: an answer was recorded
   ├──────► failed                `fail`: the call raised an error
   └──────► lost                  `declare_lost`: its proxy died
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, case, func, select, update

from agentrl.domain.schemas import Delivery, ForkReason, InteractionStatus, SessionStatus
from agentrl.store.db import codec
from agentrl.store.tables import interactions, sessions


def fail(conn: Connection, interaction_id: str, status: InteractionStatus, error: str) -> None:
    """Close a running call without an answer."""
    now = time.time()
    of_call = select(interactions.c.session_id).where(interactions.c.id == interaction_id).scalar_subquery()
    conn.execute(  # the agent is alive; a closing session no longer waits for this call
        update(sessions)
        .where(sessions.c.id == of_call)
        .values(
            last_seen_at=now,
            due_at=case((sessions.c.status == SessionStatus.CLOSING, now), else_=sessions.c.due_at),
        )
    )
    conn.execute(
        update(interactions)
        .where(interactions.c.id == interaction_id, interactions.c.status == InteractionStatus.RUNNING)
        .values(status=status, error=codec.error_text(error), finished_at=now)
    )


def mark_summary(conn: Connection, interaction_id: str) -> None:
    """Set the fork reason of a call to `summary`: its answer is the summary that begins a compacted conversation."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id == interaction_id,
            interactions.c.fork_reason.in_((ForkReason.TOOLS_CHANGED, ForkReason.OTHER_AGENT)),
        )
        .values(fork_reason=ForkReason.SUMMARY)
    )


def declare_lost(conn: Connection, run_id: str, replica: str) -> int:
    """Mark the running calls of a dead replica as `lost`; returns how many. A starting replica calls it for itself.

    Closing sessions that waited for these calls become due. Retries may claim the answers that clients waited for.
    """
    now = time.time()
    running = (
        interactions.c.replica == replica,
        interactions.c.status == InteractionStatus.RUNNING,
        interactions.c.run_id == run_id,
    )
    conn.execute(
        update(sessions)
        .where(sessions.c.id.in_(select(interactions.c.session_id).where(*running)))
        .where(sessions.c.status == SessionStatus.CLOSING)
        .values(due_at=now)
    )
    result = conn.execute(
        update(interactions)
        .where(*running)
        .values(
            status=InteractionStatus.LOST, error="the proxy stopped before the answer was recorded", finished_at=now
        )
    )
    complete = interactions.c.status == InteractionStatus.COMPLETE
    conn.execute(
        update(interactions)
        .where(
            interactions.c.holder == replica, interactions.c.delivery == Delivery.OPEN, interactions.c.run_id == run_id
        )
        .values(delivery=case((complete, Delivery.UNSURE.value), else_=Delivery.FREE.value), holder=None)
    )
    return result.rowcount


def serving_replicas(conn: Connection, run_id: str) -> set[str]:
    """The replicas, dead or alive, with running calls or waiting clients."""
    running = select(interactions.c.replica).where(
        interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
    )
    waiting = select(interactions.c.holder).where(
        interactions.c.delivery == Delivery.OPEN, interactions.c.run_id == run_id
    )
    return {name for query in (running, waiting) for name in conn.execute(query.distinct()).scalars() if name}


def oldest_running(conn: Connection, run_id: str) -> float | None:
    """The time at which the oldest running call of a run began (seconds since the epoch); None without one."""
    oldest: float | None = conn.execute(
        select(func.min(interactions.c.created_at)).where(
            interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
        )
    ).scalar_one()
    return oldest


def of_replica(conn: Connection, run_id: str, replica: str, before: float) -> list[str]:
    """The running calls of a replica that began before a time (seconds since the epoch)."""
    return list(
        conn.execute(
            select(interactions.c.id).where(
                interactions.c.replica == replica,
                interactions.c.status == InteractionStatus.RUNNING,
                interactions.c.run_id == run_id,
                interactions.c.created_at < before,
            )
        ).scalars()
    )
