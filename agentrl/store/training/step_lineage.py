"""Lineage: what each optimizer step trained."""

from __future__ import annotations

from sqlalchemy import Connection, text

from agentrl.domain.schemas import Json


def of_step(conn: Connection, run_id: str, step: int) -> list[Json]:
    """The trajectories and calls that a step trained, with staleness, return and advantage."""
    query = text(
        "SELECT * FROM lineage WHERE run_id = :run AND step = :step AND step_state != 'rolled_back' "
        "ORDER BY trajectory_id, position"
    )
    return [dict(row._mapping) for row in conn.execute(query, {"run": run_id, "step": step})]
