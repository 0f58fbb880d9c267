"""Trajectories token by token: what the engine sampled, what the trainer measured, why a token is not in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from agentrl.domain.schemas import FACTS, MASKED_FACTS, TokenFacts, TrajectoryTokens
from agentrl.errors import RequestError
from agentrl.store.calls import call_routing
from agentrl.store.exports import likeliest_tokens, loss_reasons
from agentrl.store.exports.columns import Row
from agentrl.store.exports.step_batches import by_step
from agentrl.store.tables import steps, trajectories
from agentrl.store.training import token_facts

NO_AGE = -1


def of_trajectory(conn: Connection, run_id: str, trajectory_id: str) -> Row:
    """One trajectory of a run. Raises RequestError 404."""
    found = read(conn, run_id, [trajectory_id])
    if not found:
        raise RequestError(404, f"no trajectory {trajectory_id!r} in this run", code="trajectory_not_found")
    return found[0]


def of_session(conn: Connection, session_id: str) -> list[Row]:
    """The trajectories of a session; none before they are built."""
    found = conn.execute(
        select(trajectories.c.run_id, trajectories.c.id).where(trajectories.c.session_id == session_id)
    ).all()
    return read(conn, found[0].run_id, [row.id for row in found]) if found else []


def read(conn: Connection, run_id: str, ids: Sequence[str]) -> list[Row]:
    """Rows of `columns.TOKENS`, by id; ids that are not of the run are left out."""
    heads = conn.execute(
        select(trajectories, steps.c.step, steps.c.version_before, steps.c.max_staleness, steps.c.turn_discount)
        .outerjoin(steps, steps.c.id == trajectories.c.lease_step_id)
        .where(trajectories.c.run_id == run_id, trajectories.c.id.in_(ids))
    ).all()
    if not heads:
        return []
    facts = token_facts.of_trajectories(conn, {head.id: head.lease_step_id for head in heads if head.lease_step_id})
    likeliest = likeliest_tokens.of_trajectories(conn, [head.id for head in heads])
    rows = []
    for part in by_step(conn, run_id, heads):
        reasons = loss_reasons.of_trajectories(conn, part)
        for head, tokens in zip(part.heads, part.load(conn), strict=True):
            beside = {
                "loss_reasons": reasons[head.id],
                "top_logprobs": likeliest.get(head.id),
                "expert_origins": call_routing.origins_of(conn, head.id, len(tokens.input_ids)),
            }
            rows.append(_row(head, tokens, part.ages, facts.get(head.id)) | beside)
    return sorted(rows, key=lambda row: str(row["trajectory_id"]))


def _row(head: Any, tokens: TrajectoryTokens, ages: Mapping[int, int], facts: TokenFacts | None) -> Row:
    known = np.full((len(FACTS), len(tokens.input_ids)), np.nan, np.float32)
    if facts is not None:
        known[:, tokens.loss_mask] = facts.trained
        if facts.masked.size:  # older versions recorded none
            for name, values in zip(MASKED_FACTS, facts.masked, strict=True):
                known[FACTS.index(name), tokens.masked_outputs] = values
    of_step = ages if head.lease_step_id else {}
    return {
        "trajectory_id": head.id,
        "session_id": head.session_id,
        "group_id": head.group_id,
        "state": head.state,
        "reason": head.reason,
        "step": head.step,
        "input_ids": tokens.input_ids,
        "turn_ids": tokens.turn_ids,
        "logprobs": tokens.logprobs,
        "versions": tokens.versions,
        "ages": np.array([of_step.get(version, NO_AGE) for version in tokens.versions.tolist()], np.int32),
        **dict(zip(FACTS, known, strict=True)),
    }
