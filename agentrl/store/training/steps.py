"""Optimizer steps: lease a batch, read it, complete the step, and list the steps of the surviving lineage.

    started ──► trained ──► published       `lease`, `complete`, `version_states.mark_published`
       └───────────┴───────────┴──► rolled_back      `step_resume.reconcile`

Every writing call carries the trainer's epoch (`trainer_epochs`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.batches.reward_scaling import Scale
from agentrl.domain.curriculum import Replay
from agentrl.domain.schemas import TRAINED, Batch, Json, StepState, TrainedBatch, TrajectoryState, VersionState
from agentrl.errors import StoreError
from agentrl.store import runs
from agentrl.store.db.codec import new_id
from agentrl.store.family import roots
from agentrl.store.tables import groups as groups_table
from agentrl.store.tables import step_trajectories, steps, weight_versions
from agentrl.store.tables import trajectories as trajectories_table
from agentrl.store.training import leases, trajectories
from agentrl.store.training.leases import StalePolicy
from agentrl.store.training.paths import path_outlines, scaled_rewards
from agentrl.store.training.replaying import replays
from agentrl.store.training.returns import Rescore
from agentrl.store.training.trainer_epochs import check_epoch


def lease(
    conn: Connection,
    run_id: str,
    epoch: int,
    *,
    step: int,
    n_groups: int,
    max_staleness: int,
    discount: float,
    stale_policy: StalePolicy = "mask",
    skip_tied: bool = False,
    needs_greedy: bool = False,
    scales: Mapping[str, Scale] | None = None,
    replay: Replay | None = None,
) -> str | None:
    """Lease the oldest `n_groups` ready groups for `step`; returns the step's id, or None while there are too few.

    Groups are leased whole. A token is young if its age is at most `max_staleness` versions. A group without a young
    trajectory becomes stale and gives its admission back, even when None is returned; with `skip_tied`, so does a group
    whose episodes all have the same return; with `needs_greedy`, one without a greedy session is rejected. In a leased
    group, a trajectory becomes stale if it has no young token (policy `mask`) or any old one (`drop`); its reward stays
    in the baseline. `replay` says which groups of earlier steps the batch has once more, beside the new ones
    (`replays`), and `scales` how its rewards are scaled, by component (`scaled_rewards`). Repeating the call for a
    leased step returns the same lease. `batch` reads the leased batch.

    Raises FencedError for an older epoch, StoreError when the previous step is not complete, or this one is complete or
    of another epoch.
    """
    check_epoch(conn, run_id, epoch)
    existing = conn.execute(
        select(steps).where(steps.c.run_id == run_id, steps.c.step == step, steps.c.state != StepState.ROLLED_BACK)
    ).first()
    if existing is not None:
        if existing.state == StepState.STARTED and existing.epoch == epoch:
            return str(existing.id)
        raise StoreError(f"step {step} cannot be leased: it is {existing.state}, of epoch {existing.epoch}")
    version = _version_before(conn, run_id, step)
    young = runs.young_ages(conn, run_id, version, max_staleness)
    claimed = leases.claim(
        conn,
        run_id,
        n_groups,
        young=set(young),
        policy=stale_policy,
        skip_tied=skip_tied,
        needs_greedy=needs_greedy,
    )
    if claimed is None:
        return None
    step_id = new_id()
    again: replays.Chosen = {}
    if replay is not None:
        again = replays.choose(
            conn, run_id, replay, step=step, max_staleness=max_staleness, young=set(young), policy=stale_policy
        )
    conn.execute(
        insert(steps).values(
            id=step_id,
            run_id=run_id,
            epoch=epoch,
            step=step,
            state=StepState.STARTED,
            version_before=version,
            max_staleness=max_staleness,
            turn_discount=discount,
            groups=n_groups + len(again),
            trajectories=len(claimed.trajectories),
            metrics={},
            started_at=time.time(),
        )
    )
    leases.assign(conn, claimed, step_id, epoch)
    if scales:
        scaling = scaled_rewards.at_lease(conn, run_id, step, step_id, scales)
        conn.execute(update(steps).where(steps.c.id == step_id).values(reward_scaling=scaling))
    if again:
        trained = replays.add(conn, step_id, again, set(young), stale_policy)
        conn.execute(update(steps).where(steps.c.id == step_id).values(trajectories=steps.c.trajectories + trained))
    return step_id


def refuse(conn: Connection, run_id: str, epoch: int, step_id: str, reasons: Mapping[str, str]) -> None:
    """Undo a lease: the groups in `reasons` are rejected with their reason, the others are ready again.

    Raises FencedError for an older epoch, StoreError when the step is not leased or has none of these groups.
    """
    check_epoch(conn, run_id, epoch)
    step = conn.execute(select(steps).where(steps.c.id == step_id, steps.c.run_id == run_id)).first()
    if step is None and reasons and _are_rejected(conn, reasons):
        return  # this was stored, but the answer was lost
    if step is None or step.state != StepState.STARTED or step.epoch != epoch:
        raise StoreError(f"step {step_id} cannot be given back: it is not leased")
    held = select(trajectories_table.c.group_id).where(trajectories_table.c.lease_step_id == step_id)
    if unknown := set(reasons) - set(conn.execute(held).scalars()):
        raise StoreError(f"step {step.step} has not leased the groups {sorted(unknown)}")
    leases.reject(conn, run_id, step_id, reasons)
    leases.set_state(conn, step_id, TrajectoryState.READY)
    replays.remove(conn, step_id)
    conn.execute(delete(steps).where(steps.c.id == step_id))


def _are_rejected(conn: Connection, reasons: Mapping[str, str]) -> bool:
    """Whether these groups are rejected, each with its reason."""
    rows = conn.execute(
        select(groups_table.c.id, groups_table.c.reject_reason).where(
            groups_table.c.id.in_(list(reasons)), groups_table.c.state == "rejected"
        )
    )
    return {row.id: row.reject_reason for row in rows} == dict(reasons)


def outlined(
    conn: Connection, step_id: str, *, discount: float | None = None, rescore: Rescore | None = None
) -> BatchOutline:
    """The batch of a leased, trained or published step, without its tokens.

    The lease freezes it: calls cannot change, and later rewards are not applied. `discount` and `rescore` compute its
    returns by another credit assignment. Raises StoreError for a step that is unknown or was rolled back.
    """
    step = conn.execute(select(steps).where(steps.c.id == step_id)).first()
    if step is None or step.state == StepState.ROLLED_BACK:
        raise StoreError(f"step {step_id} {'does not exist' if step is None else 'was rolled back: it has no batch'}")
    t = trajectories_table.c
    leased = conn.execute(select(t.id, t.group_id, t.state).where(t.lease_step_id == step_id)).all()
    again = replays.of_step(conn, step_id)
    stale = {row.id for row in leased if row.state == TrajectoryState.STALE} | {row.id for row in again if row.stale}
    ages = runs.young_ages(conn, step.run_id, step.version_before, step.max_staleness)
    outlines = path_outlines.read(
        conn,
        [row.id for row in sorted([*leased, *again], key=lambda row: (row.group_id, row.id))],
        ages=ages,
        discount=step.turn_discount if discount is None else discount,
        stale=stale,
        rescore=scaled_rewards.rescorer(conn, step, rescore),
    )
    return BatchOutline(
        step_id=step_id,
        step=step.step,
        version=step.version_before,
        trajectories=outlines,
        ages=trajectories.ages_in(outlines, ages),
        replayed=frozenset(row.group_id for row in again),
    )


def batch(conn: Connection, step_id: str, *, discount: float | None = None, rescore: Rescore | None = None) -> Batch:
    """The whole batch of a step. The trainer's ranks read the same batch in parts. Raises as `outlined`, and ValueError
    and LookupError for recorded data that do not belong together.
    """
    outline = outlined(conn, step_id, discount=discount, rescore=rescore)
    return Batch(
        step_id=step_id,
        step=outline.step,
        version=outline.version,
        trajectories=trajectories.with_tokens(conn, outline.trajectories, routing=True),
        ages=outline.ages,
        wasted_tokens=outline.wasted_tokens,
    )


def complete(
    conn: Connection,
    run_id: str,
    epoch: int,
    facts: TrainedBatch,
    *,
    metrics: Json,
    version: int,
    path: str,
    checksum: str,
) -> None:
    """Record a step: step and trajectories `trained`, version `pending`, in one transaction.

    A step without a durable checkpoint is rolled back when its trainer dies (`step_resume`).

    Repeating the call is harmless. Raises FencedError for an older epoch, StoreError when the step is not leased or it
    trained other trajectories than it leased.
    """
    check_epoch(conn, run_id, epoch)
    now = time.time()
    step = conn.execute(select(steps).where(steps.c.id == facts.step_id, steps.c.run_id == run_id)).first()
    if step is None:
        raise StoreError(f"step {facts.step_id} cannot be completed: it is not of this run")
    if step.state in TRAINED and step.version_after == version:
        return
    if step.state != StepState.STARTED or step.epoch != epoch:
        raise StoreError(f"step {step.step} cannot be completed: it is {step.state}, of epoch {step.epoch}")
    batch_rows = conn.execute(
        select(
            trajectories_table.c.id,
            trajectories_table.c.session_id,
            trajectories_table.c.state,
            trajectories_table.c["return"],
        ).where(trajectories_table.c.lease_step_id == facts.step_id)
    ).all()
    again = {row.id for row in replays.of_step(conn, facts.step_id) if not row.stale}
    leased = {row.id for row in batch_rows if row.state == TrajectoryState.LEASED}
    if {t.trajectory_id for t in facts.trained} != leased | again:
        raise StoreError(f"step {step.step} trained other trajectories than it leased")
    episodes = roots(conn, [row.session_id for row in batch_rows])
    returns = {episodes[row.session_id]: row[3] for row in batch_rows}
    conn.execute(
        insert(weight_versions).values(
            run_id=run_id,
            version=version,
            parent_version=step.version_before,
            step=step.step,
            path=path,
            checksum=checksum,
            state=VersionState.PENDING,
            created_at=now,
        )
    )
    conn.execute(
        update(steps)
        .where(steps.c.id == facts.step_id)
        .values(
            state=StepState.TRAINED,
            version_after=version,
            metrics=metrics,
            trained_at=now,
            estimator=facts.estimator,
            batch_digest=facts.digest,
            wasted_tokens=facts.wasted_tokens,
            tokens_trained=sum(t.tokens_trained for t in facts.trained),
            staleness_max=max((t.staleness_max for t in facts.trained), default=None),
            return_mean=sum(returns.values()) / len(returns) if returns else None,
        )
    )
    conn.execute(
        insert(step_trajectories),
        [
            {
                "step_id": facts.step_id,
                "trajectory_id": t.trajectory_id,
                "advantage": t.advantage,
                "staleness_max": t.staleness_max,
                "staleness_mean": t.staleness_mean,
                "tokens_trained": t.tokens_trained,
            }
            for t in facts.trained
        ],
    )
    leases.set_state(conn, facts.step_id, TrajectoryState.TRAINED)


def finish(conn: Connection, run_id: str, epoch: int) -> None:
    """Set the run's status to `finished`. Raises FencedError when a newer trainer has started."""
    check_epoch(conn, run_id, epoch)
    runs.set_status(conn, run_id, "finished")


def fail_run(conn: Connection, run_id: str, epoch: int, reason: str) -> None:
    """Set the run's status to `failed`. Raises FencedError when a newer trainer has started."""
    check_epoch(conn, run_id, epoch)
    runs.set_status(conn, run_id, "failed", reason)


def add_metrics(conn: Connection, run_id: str, epoch: int, step_id: str, metrics: Json) -> None:
    """Add to a completed step's metrics. Raises FencedError for an older epoch."""
    check_epoch(conn, run_id, epoch)
    known = conn.execute(select(steps.c.metrics).where(steps.c.id == step_id, steps.c.run_id == run_id)).scalar_one()
    conn.execute(update(steps).where(steps.c.id == step_id).values(metrics={**known, **metrics}))


def survives(conn: Connection, run_id: str, step_id: str) -> bool:
    """Whether the step is of this run and of its surviving lineage."""
    state = conn.execute(select(steps.c.state).where(steps.c.id == step_id, steps.c.run_id == run_id)).scalar()
    return state is not None and state != StepState.ROLLED_BACK


def of_run(conn: Connection, run_id: str, after_step: int = 0) -> list[Row[Any]]:
    """The steps of the surviving lineage that follow step `after_step`, in order."""
    surviving = select(steps).where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
    return list(conn.execute(surviving.where(steps.c.step > after_step).order_by(steps.c.step)))


def newest_state(conn: Connection, run_id: str) -> str | None:
    """The state of the surviving lineage's last step."""
    surviving = select(steps.c.state).where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
    return conn.execute(surviving.order_by(steps.c.step.desc()).limit(1)).scalar()


def _version_before(conn: Connection, run_id: str, step: int) -> int:
    if step == 1:
        return 0
    before = conn.execute(
        select(steps.c.version_after).where(
            steps.c.run_id == run_id, steps.c.step == step - 1, steps.c.state != StepState.ROLLED_BACK
        )
    ).scalar()
    if before is None:
        raise StoreError(f"step {step} cannot start: step {step - 1} is not complete")
    return int(before)
