"""The steps of a run as columns: one array for each metric, for charts."""

from __future__ import annotations

from sqlalchemy import Connection, Text, cast, select

from agentrl.domain.schemas import TRAINED, Json
from agentrl.store.db import codec
from agentrl.store.tables import steps


def of_run(conn: Connection, run_id: str, after: int = 0, newest: int | None = None) -> Json:
    """`step` and `at` (seconds since the epoch), and under `metrics` an array for each metric, null where a step has
    none. Of the surviving steps after step `after`; of these, the `newest` ones, if given.
    """
    raw = cast(steps.c.metrics, Text)  # decoded below, five times as fast
    query = select(steps.c.step, steps.c.trained_at, raw).where(
        steps.c.run_id == run_id, steps.c.state.in_(TRAINED), steps.c.step > after
    )
    if newest is not None:
        query = query.order_by(steps.c.step.desc()).limit(newest)
    rows = sorted(conn.execute(query).all(), key=lambda row: int(row.step))
    found = [codec.read_json_text(row[2]) for row in rows]
    names = sorted({name for metrics in found for name in metrics})
    return {
        "step": [row.step for row in rows],
        "at": [row.trained_at for row in rows],
        "metrics": {name: [metrics.get(name) for metrics in found] for name in names},
    }
