"""Facts of tokens: written by the trainer with its step, read with the trajectory's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, delete, insert, select

from agentrl.domain.schemas import FACTS, MASKED_FACTS, TokenFacts
from agentrl.store.db import codec
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import token_facts
from agentrl.store.training.trainer_epochs import check_epoch


def record(conn: Connection, run_id: str, epoch: int, step_id: str, facts: Mapping[str, TokenFacts]) -> None:
    """Keep the facts of a step's trajectories, in place of any that were kept before. Raises FencedError for an older
    epoch.
    """
    check_epoch(conn, run_id, epoch)
    conn.execute(delete(token_facts).where(token_facts.c.step_id == step_id))
    rows = [
        {
            "step_id": step_id,
            "trajectory_id": name,
            "tokens": one.trained.shape[1],
            "facts": one.trained.shape[0],
            "data": codec.pack_tables(one.trained, one.masked),
        }
        for name, one in facts.items()
    ]
    if rows:
        conn.execute(insert(token_facts), rows)


def of_trajectories(conn: Connection, keys: Mapping[str, str]) -> dict[str, TokenFacts]:
    """Trajectory → its facts, for trajectories given with the steps that trained them; those without facts are left
    out.
    """
    c = token_facts.c
    return {
        row.trajectory_id: _unpacked(row)
        for ids in parts(keys)
        for row in conn.execute(
            select(token_facts).where(c.trajectory_id.in_(ids), c.step_id.in_({keys[name] for name in ids}))
        )
        if keys[row.trajectory_id] == row.step_id
    }


def _unpacked(row: Row[Any]) -> TokenFacts:
    """The facts of a row; NaN for facts that its trainer did not know."""
    trained, masked = codec.unpack_tables(row.data, (row.facts, row.tokens), len(MASKED_FACTS))
    unknown = np.full((len(FACTS) - row.facts, row.tokens), np.nan, np.float32)
    return TokenFacts(np.concatenate([trained, unknown]), masked)
