"""Runs as the dashboard lists them, and which run an address means."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, func, select

from agentrl.domain.schemas import TRAINED, Json
from agentrl.store.tables import heartbeats, runs, sessions, steps


def id_of(conn: Connection, run: str | None, session: str | None) -> str | None:
    """The id of the run with this name or id, or of the run of this session; None if there is none."""
    if session is not None:
        return conn.execute(select(sessions.c.run_id).where(sessions.c.id == session)).scalar()
    return (
        conn.execute(select(runs.c.id).where(runs.c.id == run)).scalar()
        or conn.execute(select(runs.c.id).where(runs.c.name == run)).scalar()
    )


def every(conn: Connection, run_id: str | None = None) -> list[Json]:
    """The cards of all runs, the newest first; only that of `run_id`, if given."""
    query = select(runs).order_by(runs.c.created_at.desc(), runs.c.id)
    if run_id is not None:
        query = query.where(runs.c.id == run_id)
    return [_card(conn, row) for row in conn.execute(query)]


def one(conn: Connection, run_id: str) -> Json:
    """The card of one run."""
    return every(conn, run_id)[0]


def _card(conn: Connection, run: Row[Any]) -> Json:
    """A run's position, and its newest trained step."""
    newest = conn.execute(
        select(steps.c.step, steps.c.return_mean, steps.c.trained_at)
        .where(steps.c.run_id == run.id, steps.c.state.in_(TRAINED))
        .order_by(steps.c.id.desc())
        .limit(1)
    ).first()
    going_on = conn.execute(
        select(func.count()).where(sessions.c.run_id == run.id, sessions.c.built.is_(False))
    ).scalar_one()
    seen_at = conn.execute(select(func.max(heartbeats.c.last_seen_at)).where(heartbeats.c.run_id == run.id)).scalar()
    return {
        "id": run.id,
        "name": run.name,
        "status": run.status,
        "error": run.error,
        "version": run.current_version,
        "step": newest.step if newest else 0,
        "target_steps": run.target_steps,
        "reward": newest.return_mean if newest else None,
        "trained_at": newest.trained_at if newest else None,
        "open_sessions": going_on,
        "created_at": run.created_at,
        "finished_at": run.finished_at,
        "seen_at": seen_at,
        "agent": run.config.get("agent"),
        "model": run.config.get("model"),
        "settings": run.config,
    }
