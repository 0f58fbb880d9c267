"""Between which ids the rows of a run are, so that a newest-first read of one run does not read those of later runs."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from agentrl.store.db import codec
from agentrl.store.tables import heartbeats, runs

CLOCK_SLACK_S = 3600.0
"""How much the clocks of the run's processes may differ."""
LAST = "g"
"""Sorts after every id."""


def of_run(conn: Connection, run_id: str) -> tuple[str, str]:
    """An id before those of the run's sessions and calls, and one after them. Ids follow time."""
    seen = select(func.max(heartbeats.c.last_seen_at)).where(heartbeats.c.run_id == run_id).scalar_subquery()
    run = conn.execute(select(runs.c.created_at, seen.label("seen_at")).where(runs.c.id == run_id)).one()
    newest = LAST if run.seen_at is None else codec.first_id(run.seen_at + CLOCK_SLACK_S)
    return codec.first_id(max(0.0, run.created_at - CLOCK_SLACK_S)), newest
