"""A run as its clients and the dashboard see it, secrets masked."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Text, cast, select, text

from agentrl.domain.schemas import Json, StepState
from agentrl.environment import masked
from agentrl.errors import RequestError
from agentrl.store import events, runs
from agentrl.store.db import codec
from agentrl.store.tables import checkpoints, steps

NOT_SHOWN = frozenset({"key_hash", "worker_asked_at", "outside_asked_at", "outside_had_last", "engines_gone"})
"""Columns that only the proxy uses."""
PLAIN = [column for column in steps.c if column is not steps.c.metrics]
METRICS = cast(steps.c.metrics, Text).label("metrics")
"""Read as text: SQLAlchemy's decoder of JSON would take most of the time of a page of steps."""
DIGEST = checkpoints.c.digest.label("checkpoint")


def of_run(conn: Connection, run_id: str) -> Json:
    """One run: status, versions, admission, and how many groups and trajectories are in each state.

    Raises RequestError 404.
    """
    row = next((row for row in runs.all_runs(conn) if row.id == run_id), None)
    if row is None:
        raise not_found(run_id)
    return _shown(conn, row)


def of_every_run(conn: Connection) -> list[Json]:
    """Every run of the database, newest first."""
    return [_shown(conn, row) for row in runs.all_runs(conn)]


def of_steps(conn: Connection, run_id: str, after: int) -> list[Json]:
    """The run's optimizer steps after step `after`, without those that were rolled back; `checkpoint` is the digest of
    the step's checkpoint, null if it left none.
    """
    found = conn.execute(
        select(*PLAIN, DIGEST, METRICS)
        .outerjoin(checkpoints, checkpoints.c.step_id == steps.c.id)
        .where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK, steps.c.step > after)
        .order_by(steps.c.step)
    )
    names = tuple(found.keys())[:-1]
    return [
        {**dict(zip(names, row, strict=True)), "metrics": codec.read_json_text(metrics)}
        for *row, metrics in found.all()
    ]


def of_step_lineage(conn: Connection, run_id: str, step: int) -> list[Json]:
    """The trajectories and calls that a step trained, with staleness, return and advantage."""
    query = text(
        "SELECT * FROM lineage WHERE run_id = :run AND step = :step AND step_state != 'rolled_back' "
        "ORDER BY trajectory_id, position"
    )
    return [dict(row._mapping) for row in conn.execute(query, {"run": run_id, "step": step})]


def of_events(conn: Connection, run_id: str, kind: str | None) -> list[Json]:
    """The run's timeline, oldest first; of one kind of event, if one is named."""
    return [dict(row._mapping) for row in events.of_run(conn, run_id, kind)]


def not_found(run_id: str) -> RequestError:
    """The error for a run that does not exist or that the key may not read."""
    return RequestError(404, f"no run {run_id!r}", code="run_not_found")


def _shown(conn: Connection, row: Row[Any]) -> Json:
    public = {name: value for name, value in row._mapping.items() if name not in NOT_SHOWN}
    public["config"] = masked({name: value for name, value in row.config.items() if name != "database_url"})
    return {**public, "steps": row.target_steps, **runs.state_counts(conn, row.id)}
