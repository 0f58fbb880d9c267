"""Recorded trajectories for tuning: chosen by state and version, and loaded whole, whatever their age."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, select

from agentrl.domain.schemas import TrajectoryTokens
from agentrl.store import runs
from agentrl.store.tables import trajectories
from agentrl.store.training.trajectories import load


def trainable_ids(
    conn: Connection, run_id: str, states: Sequence[str], *, min_version: int | None, max_version: int | None
) -> list[str]:
    """The trajectories with trainable tokens that are in one of the states and sampled by these versions, by group."""
    t = trajectories.c
    conditions: list[ColumnElement[bool]] = [t.run_id == run_id, t.state.in_(states), t.trainable_tokens > 0]
    if min_version is not None:
        conditions.append(t.min_version >= min_version)
    if max_version is not None:
        conditions.append(t.max_version <= max_version)
    return list(conn.execute(select(t.id).where(*conditions).order_by(t.group_id, t.id)).scalars())


def load_whole(conn: Connection, run_id: str, ids: Sequence[str]) -> list[TrajectoryTokens]:
    """The tokens of trajectories, every version young enough for the loss."""
    discount = float((runs.get(conn, run_id).config.get("rollout") or {}).get("turn_discount", 1.0))
    ages = dict.fromkeys(runs.version_parents(conn, run_id), 0)
    return load(conn, ids, ages=ages, discount=discount).trajectories
