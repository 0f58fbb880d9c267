"""The batch that the next lease will most likely take, read without a lease."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from agentrl.domain.batches.outline import Outline
from agentrl.domain.schemas import TrajectoryState
from agentrl.store import runs
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import groups, trajectories
from agentrl.store.training.paths import path_outlines


def oldest(conn: Connection, run_id: str, n_groups: int) -> list[str]:
    """The oldest `n_groups` ready groups, or as many as there are."""
    ready = (groups.c.run_id == run_id, groups.c.state == "ready", groups.c.state != "trained")
    return list(conn.execute(select(groups.c.id).where(*ready).order_by(groups.c.id).limit(n_groups)).scalars())


def read(
    conn: Connection, run_id: str, group_ids: Iterable[str], *, version: int, max_staleness: int
) -> dict[str, list[Outline]]:
    """Group → outlines of its ready trajectories, for a step that starts from `version`.

    A guess: older groups may become ready before the lease, and the lease leaves out groups whose returns are tied. Its
    returns have no discount.
    """
    t = trajectories.c
    ready = select(t.id).where(t.state == TrajectoryState.READY).order_by(t.group_id, t.id)
    ids = [one for some in parts(group_ids) for one in conn.execute(ready.where(t.group_id.in_(some))).scalars()]
    ages = runs.young_ages(conn, run_id, version, max_staleness)
    found: dict[str, list[Outline]] = {}
    for one in path_outlines.read(conn, ids, ages=ages, discount=1.0):
        found.setdefault(one.group_id, []).append(one)
    return found
