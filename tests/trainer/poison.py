"""Batches with numbers that are not finite, in trajectories and in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from sqlalchemy import select, update

from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, trajectory_interactions
from agentrl.trainer.packing import Sample

POISONED = "g1-t2"
"""A trajectory of `random_samples`."""


def poisoned(samples: Sequence[Sample], trajectory_id: str, value: float = np.nan) -> list[Sample]:
    """The samples, one token of one trajectory recorded with the logprob `value`."""
    out = []
    for sample in samples:
        t = sample.tokens
        if t.trajectory_id == trajectory_id:
            logprobs = t.logprobs.copy()
            logprobs[np.flatnonzero(t.loss_mask)[1]] = value
            sample = dataclasses.replace(sample, tokens=dataclasses.replace(t, logprobs=logprobs))
        out.append(sample)
    return out


def poison_store(database: Database, trajectory_id: str) -> dict[str, bytes]:
    """Record NaN for the first call of a trajectory, which the store itself would refuse; what it was before."""
    with database.write() as conn:
        call_id = conn.execute(
            select(trajectory_interactions.c.interaction_id)
            .where(trajectory_interactions.c.trajectory_id == trajectory_id)
            .order_by(trajectory_interactions.c.position)
            .limit(1)
        ).scalar_one()
        of_call = interaction_data.c.interaction_id == call_id
        before = conn.execute(select(interaction_data.c.logprobs).where(of_call)).scalar_one()
        bad = codec.unpack_logprobs(before).copy()
        bad[0] = np.nan
        conn.execute(update(interaction_data).where(of_call).values(logprobs=codec.pack_logprobs(bad)))
    return {call_id: before}


def repair_store(database: Database, before: dict[str, bytes]) -> None:
    """Undo `poison_store`."""
    with database.write() as conn:
        for call_id, logprobs in before.items():
            conn.execute(
                update(interaction_data).where(interaction_data.c.interaction_id == call_id).values(logprobs=logprobs)
            )
