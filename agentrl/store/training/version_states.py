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

    A trainer passes its epoch; FencedError is raised when a newer one has started. It moves the run back only from a
    version that was rolled back: a proxy may finish late what the trainer has repeated at another one. Without an epoch
    (a proxy that finishes a publish) the run only moves forward. Raises StoreError for a version outside the surviving
    lineage, and for one from which the run must not go back.
    """
    now = time.time()
    run = lock_run(conn, run_id) if epoch is None else check_epoch(conn, run_id, epoch)
    row = runs.version(conn, run_id, version)
    if row is None or row.state == VersionState.ROLLED_BACK:
        raise StoreError(f"version {version} is not of the surviving lineage")
    is_older = row.step < run.published_step
    if epoch is None and is_older:
        raise StoreError(f"version {version} is older than the run's published version: only its trainer can go back")
    if is_older and (newer := overtaken_by(conn, run_id, version)) is not None:
        raise StoreError(f"version {version} is older than the run's version {newer}, which was not rolled back")
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


def overtaken_by(conn: Connection, run_id: str, version: int) -> int | None:
    """The run's version, if it is of a later step than `version` and was not rolled back; else None."""
    current, other = weight_versions.alias(), weight_versions.alias()
    newer = (
        select(current.c.version)
        .join(runs_table, (runs_table.c.id == current.c.run_id) & (runs_table.c.current_version == current.c.version))
        .join(other, other.c.run_id == current.c.run_id)
        .where(current.c.run_id == run_id, other.c.version == version)
        .where(current.c.step > other.c.step, current.c.state != VersionState.ROLLED_BACK)
    )
    return conn.execute(newer).scalar()


def unneeded_folders(
    conn: Connection, run_id: str, names: Sequence[str], *, keep: int, unknown: bool, arriving: str | None = None
) -> set[str]:
    """The weight folders that no engine will load any more, by name.

    Needed are the version that the run serves, the newest `keep` that were not rolled back, and the parent of the
    version `arriving`, which may be made from it. Where the store does not know `arriving`, all are needed. `unknown`
    says whether folders that the store does not know are unneeded.
    """
    needed = {*runs.newest_versions(conn, run_id, keep), runs.get(conn, run_id).current_version}
    if arriving is not None:
        row = runs.version(conn, run_id, version_of(arriving) or 0)
        if row is None:
            return set()
        needed.add(row.parent_version)

    def is_unneeded(name: str) -> bool:
        row = runs.version(conn, run_id, version_of(name) or 0)
        if row is None or row.path is None or Path(row.path).name != name:
            return unknown
        return row.version not in needed

    return {name for name in names if is_unneeded(name)}
