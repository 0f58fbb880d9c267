"""Calls under way: which there are, and how those without an answer are closed.

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
    """Close an intent row that has no answer."""
    now = time.time()
    of_call = select(interactions.c.session_id).where(interactions.c.id == interaction_id).scalar_subquery()
    conn.execute(  # its agent was heard of; an ended session need not wait for this call any more
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
    """The answer of this call begins a compacted conversation: that is why it did not extend another one."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id == interaction_id,
            interactions.c.fork_reason.in_((ForkReason.TOOLS_CHANGED, ForkReason.OTHER_AGENT)),
        )
        .values(fork_reason=ForkReason.SUMMARY)
    )


def declare_lost(conn: Connection, run_id: str, replica: str) -> int:
    """Calls that a dead proxy left running become `lost`; returns how many. A starting replica calls it for itself.

    Ended sessions that waited for them are due. The answers that its clients waited for may be claimed by retries.
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
    """The proxies that have calls under way or clients that wait, dead or alive."""
    running = select(interactions.c.replica).where(
        interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
    )
    waiting = select(interactions.c.holder).where(
        interactions.c.delivery == Delivery.OPEN, interactions.c.run_id == run_id
    )
    return {name for query in (running, waiting) for name in conn.execute(query.distinct()).scalars() if name}


def oldest_running(conn: Connection, run_id: str) -> float | None:
    """When the oldest of a run's calls under way began (seconds since the epoch); None when there is none."""
    oldest: float | None = conn.execute(
        select(func.min(interactions.c.created_at)).where(
            interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
        )
    ).scalar_one()
    return oldest


def of_replica(conn: Connection, run_id: str, replica: str, before: float) -> list[str]:
    """The calls of a replica that are under way and began before a time (seconds since the epoch)."""
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
