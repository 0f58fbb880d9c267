"""The batch that the next lease will most likely take, read without a lease."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain.batches.outline import Outline
from agentrl.domain.schemas import TrajectoryState
from agentrl.store import runs
from agentrl.store.tables import groups, trajectories
from agentrl.store.training.paths import path_outlines


def read(conn: Connection, run_id: str, *, n_groups: int, version: int, max_staleness: int) -> list[Outline]:
    """Outlines of the ready trajectories of the oldest `n_groups` ready groups, for a step that starts from `version`.

    A guess: older groups may become ready before the lease, and the lease leaves out groups whose returns are tied. Its
    returns have no discount.
    """
    oldest = (
        select(groups.c.id)
        .where(groups.c.run_id == run_id, groups.c.state == "ready", groups.c.state != "trained")
        .order_by(groups.c.id)
        .limit(n_groups)
    )
    t = trajectories.c
    ids = conn.execute(
        select(t.id).where(t.group_id.in_(oldest), t.state == TrajectoryState.READY).order_by(t.group_id, t.id)
    ).scalars()
    ages = runs.young_ages(conn, run_id, version, max_staleness)
    return path_outlines.read(conn, list(ids), ages=ages, discount=1.0)
