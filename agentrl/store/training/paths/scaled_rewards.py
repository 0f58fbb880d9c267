"""The rewards of a step's batch as they are trained: normalised and clipped (`reward_scaling`).

    lease ──► statistics of the step before + the rewards of this batch ──► the step's `reward_scaling`
    read, replay ──► recorded rewards, scaled by it (exported rows have the recorded ones)

The lease freezes the batch's rewards, and a rolled-back step does not count, so the statistics follow the lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.batches.reward_scaling import RewardScaling, Scale
from agentrl.domain.credit import SessionRewards
from agentrl.domain.schemas import Json, StepState
from agentrl.store import family
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import sessions, steps, trajectories
from agentrl.store.training import batch_facts, returns
from agentrl.store.training.returns import Rescore


def at_lease(conn: Connection, run_id: str, step: int, step_id: str, scales: Mapping[str, Scale]) -> Json:
    """The scaling of a step that has leased its batch."""
    before = conn.execute(
        select(steps.c.reward_scaling).where(
            steps.c.run_id == run_id, steps.c.step == step - 1, steps.c.state != StepState.ROLLED_BACK
        )
    ).scalar()
    known = RewardScaling(scales, RewardScaling.from_json(before).moments if before else {})
    leased = select(trajectories.c.session_id).where(trajectories.c.lease_step_id == step_id)
    sources = _sources(conn, step_id, conn.execute(leased).scalars())
    found = returns.recorded(conn, sorted(sources))
    values = ((sources[sid], name, value) for sid in sorted(sources) for name, value in found[sid])
    return known.with_rewards(values).to_json()


def rescorer(conn: Connection, step: Row[Any], rescore: Rescore | None = None) -> Rescore | None:
    """What makes the rewards of a step's sessions those that it trains, and then applies `rescore`."""
    if not step.reward_scaling:
        return rescore
    batch = batch_facts.in_batch(step.id)
    greedy = select(sessions.c.id).where(
        sessions.c.group_id.in_(select(trajectories.c.group_id).where(batch)), sessions.c.is_baseline.is_(True)
    )
    ids = [*conn.execute(select(trajectories.c.session_id).where(batch)).scalars(), *conn.execute(greedy).scalars()]
    scaling, sources = RewardScaling.from_json(step.reward_scaling), _sources(conn, step.id, ids)

    def scaled(session_id: str, recorded: SessionRewards) -> SessionRewards:
        trained = scaling.scaled(sources[session_id], recorded)
        return trained if rescore is None else rescore(session_id, trained)

    return scaled


def _sources(conn: Connection, step_id: str, session_ids: Iterable[str]) -> dict[str, str]:
    """These sessions of a step's batch, and those above them → the source of their task; "" without one."""
    of_groups = batch_facts.sources(conn, step_id)
    c = sessions.c
    return {
        row.id: of_groups.get(row.group_id, "")
        for ids in parts(family.lineage(conn, session_ids))
        for row in conn.execute(select(c.id, c.group_id).where(c.id.in_(ids)))
    }
