"""How often the policy has solved a task, from the recorded rewards of its last groups."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain.curriculum import SuccessRate
from agentrl.domain.schemas import SessionStatus
from agentrl.store.tables import groups, sessions
from agentrl.store.training import returns


def success_rate(conn: Connection, run_id: str, task_id: str, of: SuccessRate) -> float | None:
    """The share of successes among the completed, rewarded episodes of the task's last groups that have ended. None
    without any.
    """
    last = (
        select(groups.c.id)
        .where(groups.c.run_id == run_id, groups.c.task_id == task_id, groups.c.state != "running")
        .order_by(groups.c.cursor.desc())
        .limit(of.groups)
    )
    ended = list(
        conn.execute(
            select(sessions.c.id).where(
                sessions.c.group_id.in_(list(conn.execute(last).scalars())),
                sessions.c.status == SessionStatus.COMPLETED,
                sessions.c.parent_session_id.is_(None),
                sessions.c.is_baseline.is_(False),
            )
        ).scalars()
    )
    facts = returns.applied(conn, ended)
    found = [facts[session_id] for session_id in ended]
    return of.rate([one.total for one in found if one.any])
