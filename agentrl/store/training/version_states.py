"""Weight versions as their steps make and publish them.

pending ──► published        `steps.complete` inserts a version, `mark_published` moves the run to it
   └───────────┴──► rolled_back      `step_resume.reconcile`
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, select, update

from agentrl.domain.schemas import StepState, VersionState
from agentrl.errors import StoreError
from agentrl.store import runs
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import steps, weight_versions
from agentrl.store.training.trainer_epochs import check_epoch, lock_run


def next_version(conn: Connection, run_id: str) -> int:
    """A version number that was never used."""
    newest = conn.execute(
        select(func.max(weight_versions.c.version)).where(weight_versions.c.run_id == run_id)
    ).scalar_one()
    return int(newest) + 1


def set_folder(conn: Connection, run_id: str, epoch: int, version: int, *, path: str, checksum: str) -> None:
    """A version's folder was made anew, in another type perhaps. Raises FencedError when the epoch is over."""
    check_epoch(conn, run_id, epoch)
    conn.execute(
        update(weight_versions)
        .where(weight_versions.c.run_id == run_id, weight_versions.c.version == version)
        .values(path=path, checksum=checksum)
    )


def mark_published(conn: Connection, run_id: str, version: int, epoch: int | None = None) -> None:
    """Every serving engine has `version`: the run moves to it, its step is published.

    A trainer names its epoch, and FencedError is raised when that is over; without one (a proxy that finishes what it
    had begun) the run only moves forward. Raises StoreError for a version that is not of the surviving lineage.
    """
    now = time.time()
    run = lock_run(conn, run_id) if epoch is None else check_epoch(conn, run_id, epoch)
    row = runs.version(conn, run_id, version)
    if row is None or row.state == VersionState.ROLLED_BACK:
        raise StoreError(f"version {version} is not of the surviving lineage")
    if epoch is None and row.step < run.published_step:
        raise StoreError(f"version {version} is older than what the run has published: only its trainer goes back")
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
