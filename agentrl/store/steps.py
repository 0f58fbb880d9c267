"""Optimizer steps: the trainer's epoch, leases, completion, publishing, and what a restarted trainer finds.

Every writing call carries the trainer's epoch. `begin_epoch` ends the epochs before it, and a trainer of an older one
gets FencedError from whatever it tries next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from agentrl import staleness
from agentrl.errors import FencedError, StoreError
from agentrl.schemas import Batch, Json, ResumePlan, StepState, TrainedTrajectory, TrajectoryState, VersionState
from agentrl.store import runs, trajectories
from agentrl.store.codec import new_id
from agentrl.tables import groups, step_trajectories, steps, weight_versions
from agentrl.tables import runs as runs_table
from agentrl.tables import trajectories as trajectories_table


def begin_epoch(conn: Connection, run_id: str) -> int:
    """Start a new trainer epoch; every older trainer of the run is fenced from here on."""
    return int(
        conn.execute(
            update(runs_table)
            .where(runs_table.c.id == run_id)
            .values(trainer_epoch=runs_table.c.trainer_epoch + 1)
            .returning(runs_table.c.trainer_epoch)
        ).scalar_one()
    )


def check_epoch(conn: Connection, run_id: str, epoch: int) -> Row[Any]:
    """The run, locked. Raises FencedError when a newer trainer has started."""
    run = conn.execute(select(runs_table).where(runs_table.c.id == run_id).with_for_update()).one()
    if run.trainer_epoch != epoch:
        raise FencedError(f"trainer epoch {epoch} is over: epoch {run.trainer_epoch} has started")
    return run


def reconcile(conn: Connection, run_id: str, epoch: int, checkpoint_step_id: str | None) -> ResumePlan:
    """Bring store and checkpoint to one step, whichever is ahead.

    The checkpoint's step was leased but never completed: roll forward (the caller completes it; `roll_forward`).
    Steps after the checkpoint's: roll back; their trajectories are ready again and their versions never reused.
    Leases of steps that never finished are given back.
    """
    check_epoch(conn, run_id, epoch)
    anchor = None
    if checkpoint_step_id is not None:
        anchor = conn.execute(select(steps).where(steps.c.id == checkpoint_step_id, steps.c.run_id == run_id)).first()
        if anchor is None or anchor.state == StepState.ROLLED_BACK:
            raise StoreError(f"the checkpoint's step {checkpoint_step_id} is not of this run's surviving lineage")
    kept_step = anchor.step if anchor else 0
    roll_forward = anchor is not None and anchor.state == StepState.STARTED
    later = list(
        conn.execute(
            select(steps).where(
                steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK, steps.c.step > kept_step
            )
        )
    )
    for step in later:
        _roll_back(conn, step)
    if roll_forward:
        assert anchor is not None
        conn.execute(update(steps).where(steps.c.id == anchor.id).values(epoch=epoch))
        version = anchor.version_before
    else:
        version = anchor.version_after if anchor else 0
    published = min(kept_step - (1 if roll_forward else 0), runs.get(conn, run_id).published_step)
    conn.execute(update(runs_table).where(runs_table.c.id == run_id).values(published_step=published))
    current = runs.get(conn, run_id).current_version
    return ResumePlan(
        step=kept_step,
        version=version,
        republish=version if current != version and not roll_forward else None,
        roll_forward=roll_forward,
        rolled_back_steps=sorted(step.step for step in later),
    )


def lease(
    conn: Connection, run_id: str, epoch: int, *, step: int, n_groups: int, max_staleness: int, discount: float
) -> Batch | None:
    """Lease the oldest `n_groups` ready groups for `step`, or None while there are too few.

    Groups in which every token is too old become stale and give their admission back, also when None is returned.
    Raises FencedError for an older epoch.
    """
    check_epoch(conn, run_id, epoch)
    version = _version_before(conn, run_id, step)
    ages = staleness.ages(version, runs.version_parents(conn, run_id))
    chosen = _young_groups(conn, run_id, n_groups, ages, max_staleness)
    if len(chosen) < n_groups:
        return None
    ids = list(
        conn.execute(
            select(trajectories_table.c.id)
            .where(trajectories_table.c.group_id.in_(chosen), trajectories_table.c.state == TrajectoryState.READY)
            .order_by(trajectories_table.c.group_id, trajectories_table.c.id)
        ).scalars()
    )
    batch = trajectories.load(conn, ids, ages=ages, max_staleness=max_staleness, discount=discount)
    stale = {t.trajectory_id for t in batch if not t.loss_mask.any()}
    wasted = sum(
        sum(1 for v in t.versions[t.turn_ids >= 0].tolist() if ages.get(v, max_staleness + 1) > max_staleness)
        for t in batch
    )
    step_id = new_id()
    conn.execute(
        insert(steps).values(
            id=step_id, run_id=run_id, epoch=epoch, step=step, state=StepState.STARTED, version_before=version,
            wasted_tokens=wasted, metrics={}, started_at=time.time(),
        )
    )  # fmt: skip
    conn.execute(update(groups).where(groups.c.id.in_(chosen)).values(state="leased"))
    for trajectory in batch:
        is_stale = trajectory.trajectory_id in stale
        conn.execute(
            update(trajectories_table)
            .where(trajectories_table.c.id == trajectory.trajectory_id)
            .values(
                {
                    "state": TrajectoryState.STALE if is_stale else TrajectoryState.LEASED,
                    "reason": "too_old" if is_stale else None,
                    "lease_epoch": epoch,
                    "lease_step_id": step_id,
                    "return": trajectory.session_return,
                }
            )
        )
    return Batch(step_id=step_id, step=step, version=version, trajectories=batch, ages=ages, wasted_tokens=wasted)


def next_version(conn: Connection, run_id: str) -> int:
    """A version number that was never used."""
    newest = conn.execute(
        select(func.max(weight_versions.c.version)).where(weight_versions.c.run_id == run_id)
    ).scalar_one()
    return int(newest) + 1


def complete(
    conn: Connection, run_id: str, epoch: int, step_id: str, *, trained: Sequence[TrainedTrajectory],
    metrics: Json, version: int, path: str, checksum: str,
) -> None:  # fmt: skip
    """One transaction {step trained, trajectories trained, version pending}, after the checkpoint is durable.

    Raises FencedError for an older epoch, StoreError when the step is not leased or a trajectory is not its own.
    """
    check_epoch(conn, run_id, epoch)
    now = time.time()
    step = conn.execute(select(steps).where(steps.c.id == step_id)).one()
    if step.state != StepState.STARTED or step.epoch != epoch:
        raise StoreError(f"step {step.step} cannot be completed: it is {step.state}, of epoch {step.epoch}")
    leased = set(
        conn.execute(
            select(trajectories_table.c.id).where(
                trajectories_table.c.lease_step_id == step_id, trajectories_table.c.state == TrajectoryState.LEASED
            )
        ).scalars()
    )
    if {t.trajectory_id for t in trained} != leased:
        raise StoreError(f"step {step.step} trained other trajectories than it leased")
    conn.execute(
        insert(weight_versions).values(
            run_id=run_id, version=version, parent_version=step.version_before, step=step.step, path=path,
            checksum=checksum, state=VersionState.PENDING, created_at=now,
        )
    )  # fmt: skip
    conn.execute(
        update(steps)
        .where(steps.c.id == step_id)
        .values(state=StepState.TRAINED, version_after=version, metrics=metrics, trained_at=now)
    )
    conn.execute(
        insert(step_trajectories),
        [
            {
                "step_id": step_id, "trajectory_id": t.trajectory_id, "advantage": t.advantage,
                "staleness_max": t.staleness_max, "staleness_mean": t.staleness_mean,
                "tokens_trained": t.tokens_trained,
            }
            for t in trained
        ],
    )  # fmt: skip
    _set_leased(conn, step_id, TrajectoryState.TRAINED)


def mark_published(conn: Connection, run_id: str, version: int) -> None:
    """Every serving engine has `version`: the run moves to it, its step is published."""
    now = time.time()
    row = runs.version(conn, run_id, version)
    if row is None or row.state == VersionState.ROLLED_BACK:
        raise StoreError(f"version {version} is not of the surviving lineage")
    conn.execute(
        update(weight_versions)
        .where(weight_versions.c.run_id == run_id, weight_versions.c.version == version)
        .values(state=VersionState.PUBLISHED, published_at=now)
    )
    conn.execute(
        update(steps)
        .where(steps.c.run_id == run_id, steps.c.version_after == version, steps.c.state == StepState.TRAINED)
        .values(state=StepState.PUBLISHED, published_at=now)
    )
    conn.execute(
        update(runs_table).where(runs_table.c.id == run_id).values(current_version=version, published_step=row.step)
    )


def survives(conn: Connection, run_id: str, step_id: str) -> bool:
    """Whether the step is of this run and of its surviving lineage."""
    state = conn.execute(select(steps.c.state).where(steps.c.id == step_id, steps.c.run_id == run_id)).scalar()
    return state is not None and state != StepState.ROLLED_BACK


def of_run(conn: Connection, run_id: str) -> list[Row[Any]]:
    """The steps of the surviving lineage, in order."""
    return list(
        conn.execute(
            select(steps).where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK).order_by(steps.c.step)
        )
    )


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


def _young_groups(conn: Connection, run_id: str, n_groups: int, ages: dict[int, int], max_staleness: int) -> list[str]:
    """The oldest ready groups with at least one young token; groups without any are retired as stale."""
    young: list[str] = []
    after = ""
    while len(young) < n_groups:
        page = list(
            conn.execute(
                select(groups.c.id)
                .where(groups.c.run_id == run_id, groups.c.state == "ready", groups.c.id > after)
                .order_by(groups.c.id)
                .limit(n_groups)
                .with_for_update(skip_locked=True)
            ).scalars()
        )
        if not page:
            return young
        after = page[-1]
        rows = conn.execute(
            select(
                trajectories_table.c.group_id, trajectories_table.c.min_version, trajectories_table.c.max_version
            ).where(trajectories_table.c.group_id.in_(page), trajectories_table.c.state == TrajectoryState.READY)
        )
        alive = {
            row.group_id
            for row in rows
            if any(ages.get(v, max_staleness + 1) <= max_staleness for v in range(row.min_version, row.max_version + 1))
        }
        for group_id in page:
            if group_id in alive:
                young.append(group_id)
            else:
                _retire_group(conn, run_id, group_id)
    return young[:n_groups]


def _retire_group(conn: Connection, run_id: str, group_id: str) -> None:
    conn.execute(update(groups).where(groups.c.id == group_id).values(state="stale"))
    conn.execute(
        update(trajectories_table)
        .where(trajectories_table.c.group_id == group_id, trajectories_table.c.state == TrajectoryState.READY)
        .values(state=TrajectoryState.STALE, reason="too_old")
    )
    conn.execute(update(runs_table).where(runs_table.c.id == run_id).values(returned=runs_table.c.returned + 1))


def _set_leased(conn: Connection, step_id: str, state: TrajectoryState) -> None:
    """Move what a step leased or trained, trajectories and groups, to `state`."""
    of_step = select(trajectories_table.c.group_id).where(trajectories_table.c.lease_step_id == step_id)
    conn.execute(
        update(groups).where(groups.c.id.in_(of_step), groups.c.state.in_(["leased", "trained"])).values(state=state)
    )
    held = trajectories_table.c.state.in_([TrajectoryState.LEASED, TrajectoryState.TRAINED])
    values: Json = {"state": state}
    if state == TrajectoryState.READY:
        held = trajectories_table.c.state.in_([TrajectoryState.LEASED, TrajectoryState.TRAINED, TrajectoryState.STALE])
        values |= {"lease_step_id": None, "lease_epoch": None, "reason": None}
    conn.execute(update(trajectories_table).where(trajectories_table.c.lease_step_id == step_id, held).values(values))


def _roll_back(conn: Connection, step: Row[Any]) -> None:
    conn.execute(update(steps).where(steps.c.id == step.id).values(state=StepState.ROLLED_BACK))
    if step.version_after is not None:
        conn.execute(
            update(weight_versions)
            .where(weight_versions.c.run_id == step.run_id, weight_versions.c.version == step.version_after)
            .values(state=VersionState.ROLLED_BACK)
        )
    _set_leased(conn, step.id, TrajectoryState.READY)
