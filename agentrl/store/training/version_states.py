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
    """The next version number; numbers are never reused."""
    newest = conn.execute(
        select(func.max(weight_versions.c.version)).where(weight_versions.c.run_id == run_id)
    ).scalar_one()
    return int(newest) + 1


def set_folder(conn: Connection, run_id: str, epoch: int, version: int, *, path: str, checksum: str) -> None:
    """Record that a version's folder was written again, perhaps in another data type. Raises FencedError."""
    check_epoch(conn, run_id, epoch)
    conn.execute(
        update(weight_versions)
        .where(weight_versions.c.run_id == run_id, weight_versions.c.version == version)
        .values(path=path, checksum=checksum)
    )


def mark_published(conn: Connection, run_id: str, version: int, epoch: int | None = None) -> None:
    """Move the run to `version`, which every serving engine has, and mark its step published.

    A trainer passes its epoch; FencedError is raised when a newer one has started. Without an epoch (a proxy that
    finishes a publish) the run only moves forward. Raises StoreError for a version outside the surviving lineage.
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
