"""The samples of one band of `sample_flow`, newest first, a page at a time."""

from __future__ import annotations

from sqlalchemy import Connection, exists, func, select

from agentrl.domain.schemas import Json, StepState
from agentrl.store.sample_flow import WAITING
from agentrl.store.tables import sessions, step_trajectories, steps, trajectories

PAGE = 50
BANDS = ("trained", "waiting", "stale", "rejected", "open", "without calls")


def of_band(conn: Connection, run_id: str, band: str, reason: str | None, before: str | None = None) -> list[Json]:
    """PAGE samples of a band and reason: those older than the sample with the id `before`, if given."""
    if band in ("open", "without calls"):
        return _sessions(conn, run_id, band, reason, before)
    states = WAITING if band == "waiting" else (band,)
    t = trajectories.c
    step = (  # of the surviving lineage; a trajectory may also be in steps that were rolled back
        select(func.max(steps.c.step))
        .join(step_trajectories, step_trajectories.c.step_id == steps.c.id)
        .where(step_trajectories.c.trajectory_id == t.id, steps.c.state != StepState.ROLLED_BACK)
        .scalar_subquery()
    )
    query = (
        select(
            t.id, t.session_id, t.group_id, t.state, t.reason, t.tokens, t.trainable_tokens, t.min_version,
            t.max_version, t["return"].label("return_"), t.created_at, step.label("step"),
        )
        .where(t.run_id == run_id, t.state.in_(states))
        .order_by(t.id.desc())
        .limit(PAGE)
    )  # fmt: skip
    if reason is not None:
        query = query.where(t.reason == reason)
    if before is not None:
        query = query.where(t.id < before)
    return [dict(row._mapping) for row in conn.execute(query)]


def _sessions(conn: Connection, run_id: str, band: str, status: str | None, before: str | None) -> list[Json]:
    s = sessions.c
    query = (
        select(
            s.id.label("session_id"), s.id, s.group_id, s.status.label("state"), s.error.label("reason"), s.created_at
        )
        .where(s.run_id == run_id, s.is_eval.is_(False))
        .order_by(s.id.desc())
        .limit(PAGE)
    )
    if band == "open":
        query = query.where(s.built.is_(False))
    else:
        query = query.where(s.built.is_(True), ~exists().where(trajectories.c.session_id == s.id))
    if status is not None:
        query = query.where(s.status == status)
    if before is not None:
        query = query.where(s.id < before)
    return [dict(row._mapping) for row in conn.execute(query)]
