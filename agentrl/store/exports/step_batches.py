"""Trajectories by the step that leased or trained them, each step with what decides their loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection

from agentrl.domain.schemas import TrajectoryState, TrajectoryTokens
from agentrl.store import runs
from agentrl.store.training import trajectories as paths


@dataclass(frozen=True, slots=True)
class OfStep:
    """Rows of `trajectories` with the columns of their step, and the step's settings."""

    heads: list[Any]
    ages: Mapping[int, int]  # weight version → age, of the versions that are young enough; all of them without a step
    discount: float

    def load(self, conn: Connection) -> list[TrajectoryTokens]:
        """Their arrays, in the order of `heads`."""
        ids = [head.id for head in self.heads]
        stale = {head.id for head in self.heads if head.state == TrajectoryState.STALE}
        return paths.load(conn, ids, ages=self.ages, discount=self.discount, stale=stale).trajectories


def by_step(conn: Connection, run_id: str, heads: Sequence[Any]) -> Iterator[OfStep]:
    """The rows by step. They have the columns `lease_step_id, version_before, max_staleness, turn_discount`."""
    discount = float((runs.get(conn, run_id).config.get("rollout") or {}).get("turn_discount", 1.0))
    ordered = sorted(heads, key=lambda head: head.lease_step_id or "")
    for step_id, of_step in groupby(ordered, key=lambda head: head.lease_step_id):
        rows = list(of_step)
        if step_id is None:
            yield OfStep(rows, dict.fromkeys(runs.version_parents(conn, run_id), 0), discount)
        else:
            ages = runs.young_ages(conn, run_id, rows[0].version_before, rows[0].max_staleness)
            yield OfStep(rows, ages, rows[0].turn_discount)
