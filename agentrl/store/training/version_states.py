"""Weight versions as their steps make and publish them.

pending ──► published        `steps.complete` inserts a version, `mark_published` moves the run to it
   └───────────┴──► rolled_back      `step_resume.reconcile`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, func, select, update

from agentrl.domain.schemas import StepState, VersionState
from agentrl.errors import StoreError
from agentrl.store import runs
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import steps, weight_versions
from agentrl.store.training.trainer_epochs import check_epoch, lock_run
from agentrl.versions.weights_folder import version_of

KEEP_VERSIONS = 3
"""How many of the newest versions keep their folders."""


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
        raise StoreError(f"version {version} is older than the run's published version: only its trainer can go back")
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


def unneeded_folders(conn: Connection, run_id: str, names: Sequence[str], *, keep: int, unknown: bool) -> set[str]:
    """The weight folders that no engine will load any more, by name.

    They are those of all versions but the one that the run serves and the newest `keep` that were not rolled back.
    `unknown` says whether this includes folders that the store does not know.
    """
    needed = {*runs.newest_versions(conn, run_id, keep), runs.get(conn, run_id).current_version}

    def is_unneeded(name: str) -> bool:
        row = runs.version(conn, run_id, version_of(name) or 0)
        if row is None or row.path is None or Path(row.path).name != name:
            return unknown
        return row.version not in needed

    return {name for name in names if is_unneeded(name)}
