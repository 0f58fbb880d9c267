"""Brings the store and a trainer's checkpoint to one step when a run is resumed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select, update

from agentrl.domain.schemas import ResumePlan, StepState, TrajectoryState, VersionState
from agentrl.errors import StoreError
from agentrl.store import runs
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import steps, weight_versions
from agentrl.store.training import leases
from agentrl.store.training.trainer_epochs import check_epoch


def reconcile(conn: Connection, run_id: str, epoch: int, checkpoint_step_id: str | None) -> ResumePlan:
    """Bring the store and a checkpoint to the same step, whichever is ahead.

    A checkpoint of a step that was leased but not completed rolls forward: the caller completes the step
    (`roll_forward`). Steps after the checkpoint's are rolled back: their trajectories become ready again, and their
    version numbers are never reused. Leases of unfinished steps are given back.
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


def _roll_back(conn: Connection, step: Row[Any]) -> None:
    conn.execute(update(steps).where(steps.c.id == step.id).values(state=StepState.ROLLED_BACK))
    if step.version_after is not None:
        conn.execute(
            update(weight_versions)
            .where(weight_versions.c.run_id == step.run_id, weight_versions.c.version == step.version_after)
            .values(state=VersionState.ROLLED_BACK)
        )
    leases.set_state(conn, step.id, TrajectoryState.READY)
