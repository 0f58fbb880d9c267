"""How far engine and trainer disagree about the tokens of a step, trajectory by trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import FACTS, StepState, TrajectoryState
from agentrl.store import runs
from agentrl.store.tables import token_facts, trajectories
from agentrl.store.training import token_facts as facts_of
from agentrl.store.training import trajectories as token_paths

MOST_TOKENS = 400_000
"""Tokens of the trajectories of one step that are compared, prompts included."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """|engine − trainer| of a trajectory's logprobs, in nats: the mean and the largest; over tokens of the step's own
    weights alone, `same` (None without such a token).
    """

    trajectory_id: str
    tokens: int
    mean: float
    largest: float
    same: float | None


def of_step(conn: Connection, step: Row[Any]) -> tuple[list[Doubt], int]:
    """The trajectories whose tokens were measured, the largest mean first; and how many were not compared."""
    if step.state == StepState.ROLLED_BACK:
        return [], 0
    rows = conn.execute(
        select(token_facts.c.trajectory_id, trajectories.c.tokens, trajectories.c.state)
        .join(trajectories, trajectories.c.id == token_facts.c.trajectory_id)
        .where(token_facts.c.step_id == step.id, trajectories.c.lease_step_id == step.id)
        .order_by(token_facts.c.trajectory_id)
    ).all()
    chosen, tokens = [], 0
    for row in rows:
        tokens += row.tokens
        if tokens <= MOST_TOKENS:
            chosen.append(row)
    return sorted(_compared(conn, step, chosen), key=lambda one: -one.mean), len(rows) - len(chosen)


def _compared(conn: Connection, step: Row[Any], rows: list[Any]) -> list[Doubt]:
    ids = [row.trajectory_id for row in rows]
    if not ids:
        return []
    measured = facts_of.of_trajectories(conn, dict.fromkeys(ids, step.id))
    ages = runs.young_ages(conn, step.run_id, step.version_before, step.max_staleness)
    stale = {row.trajectory_id for row in rows if row.state == TrajectoryState.STALE}
    loaded = token_paths.load(conn, ids, ages=ages, discount=step.turn_discount, stale=stale)
    found = []
    for tokens in loaded.trajectories:
        trainer = measured[tokens.trajectory_id].trained[FACTS.index("logprob")]
        mask = tokens.loss_mask
        if len(trainer) != int(mask.sum()):  # the batch was read under other rules than it was trained under
            continue
        gap = np.abs(tokens.logprobs[mask] - trainer)
        known = np.isfinite(gap)
        if not known.any():
            continue
        same = known & (tokens.versions[mask] == step.version_before) & ~tokens.kv_mixed[mask]
        found.append(
            Doubt(
                tokens.trajectory_id,
                int(known.sum()),
                float(gap[known].mean()),
                float(gap[known].max()),
                float(gap[same].mean()) if same.any() else None,
            )
        )
    return found
