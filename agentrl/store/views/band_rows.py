"""The samples of one band of `sample_flow`, newest first, a page at a time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, select

from agentrl.domain.schemas import Json, TrajectoryState
from agentrl.store import sample_flow
from agentrl.store.tables import sessions, steps, trajectories
from agentrl.store.views import run_extent

PAGE = 50
BANDS = ("trained", "waiting", "stale", "rejected", "open", "without calls")


def of_band(conn: Connection, run_id: str, band: str, reason: str | None, before: str | None = None) -> list[Json]:
    """PAGE samples of a band and reason: those older than the sample with the id `before`, if given."""
    if band in ("open", "without calls"):
        queries = [_sessions(run_id, band, reason)]
    else:
        states = sample_flow.WAITING if band == "waiting" else (TrajectoryState(band),)
        queries = [
            _trajectories(run_id, state, reason) for state in states
        ]  # one each: each reads one part of an index
    end = before or run_extent.of_run(conn, run_id)[1]
    found = [row for query in queries for row in conn.execute(_page(query, end))]
    return [dict(row._mapping) for row in sorted(found, key=lambda row: str(row.id), reverse=True)[:PAGE]]


def _page(query: Select[Any], end: str) -> Select[Any]:
    by = query.selected_columns.id
    return query.where(by < end).order_by(by.desc()).limit(PAGE)


def _trajectories(run_id: str, state: str, reason: str | None) -> Select[Any]:
    t = trajectories.c
    query = (
        select(
            t.id, t.session_id, t.group_id, t.state, t.reason, t.tokens, t.trainable_tokens, t.min_version,
            t.max_version, t["return"].label("return_"), t.created_at, steps.c.step,
        )
        .outerjoin(steps, (steps.c.id == t.lease_step_id) & (steps.c.state != "rolled_back"))
        .where(t.run_id == run_id, t.state == state)
    )  # fmt: skip
    if state != TrajectoryState.TRAINED:
        query = query.where(t.state != TrajectoryState.TRAINED)  # lets SQLite use `ix_trajectories_untrained`
    return query if reason is None else query.where(t.reason == reason)


def _sessions(run_id: str, band: str, status: str | None) -> Select[Any]:
    s = sessions.c
    query = select(
        s.id,
        s.id.label("session_id"),
        s.group_id,
        s.status.label("state"),
        s.error.label("reason"),
        s.created_at,
    ).where(s.run_id == run_id)
    if band == "open":
        query = query.where(s.is_eval.is_(False), s.built.is_(False))
    else:
        query = query.where(s.trajectories == sample_flow.NONE)
    return query if status is None else query.where(s.status == status)
