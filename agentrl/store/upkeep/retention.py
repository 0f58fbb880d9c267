"""Retention: removes groups that were never trained and that no lineage needs, a few at a time while the run goes on.

A group is removed as a whole, with its sessions, calls, rewards and trajectories, when it is rejected, stale or
evaluated, finished before the cut, and none of its trajectories was ever leased or trained, not even by a step that
was rolled back. So every row that a past batch is rebuilt from stays, as do the run, its tasks, steps and weight
versions. The evaluations of the base weights and of the newest step stay too: the run's summary compares them.
The facts of trained tokens are no part of a batch: those of older steps are removed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

from sqlalchemy import Connection, select, text

from agentrl.domain.schemas import StepState
from agentrl.errors import StoreError
from agentrl.store.db import faults
from agentrl.store.db.database import Database
from agentrl.store.tables import metadata, steps
from agentrl.store.upkeep.prunable_rows import count_groups, kept_evaluations, next_groups, orphans
from agentrl.store.upkeep.pruning_database import without_scans
from agentrl.store.upkeep.row_removal import (
    PAGE_CONTENTS,
    Pruned,
    estimate_rest,
    measure,
    remove_contents,
    remove_events,
    remove_facts,
    remove_groups,
    remove_heartbeats,
)

Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all)."""


def cut_before_steps(conn: Connection, run_id: str, keep: int) -> float:
    """The time at which the oldest of the `keep` newest steps began (seconds since the epoch); 0 if the run has no more
    steps.
    """
    started = list(
        conn.execute(
            select(steps.c.started_at)
            .where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
            .order_by(steps.c.step.desc())
            .limit(keep + 1)
        ).scalars()
    )
    if len(started) <= keep:
        return 0.0
    return float(started[keep - 1]) if keep else time.time()


def estimate(database: Database, run_id: str, cut: float) -> Pruned:
    """The amounts that `prune` would remove; reads all of these rows."""
    kept = database.query(kept_evaluations, run_id)
    total = Pruned()
    after = ""
    while page := database.query(next_groups, run_id, cut, kept, after):
        total.add(database.query(measure, page))
        after = page[-1]
    total.add(database.query(estimate_rest, run_id, cut, kept))
    return total


def prune(database: Database, run_id: str, cut: float, progress: Progress = lambda done, total: None) -> Pruned:
    """Remove groups that finished before `cut` (epoch seconds) and that no lineage needs, and the facts of tokens of
    steps that began before it; returns the amounts removed.

    Each transaction removes a few groups and lowers the run's counters to match, so other transactions wait only
    briefly. If it is interrupted, some groups are removed, each as a whole.
    """
    total = Pruned()
    with without_scans(database) as pruning:
        kept = pruning.query(kept_evaluations, run_id)
        in_all, done = pruning.query(count_groups, run_id, cut, kept), 0
        after = ""
        while page := pruning.query(next_groups, run_id, cut, kept, after):
            total.add(pruning.transact(remove_groups, run_id, cut, kept, page))
            after, done = page[-1], done + len(page)
            progress(min(done, in_all), in_all)
        total.add(_prune_contents(pruning))
    while (facts := database.transact(remove_facts, run_id, cut)).rows["token_facts"]:
        total.add(facts)
    while removed := database.transact(remove_events, run_id, cut):
        total.rows["events"] += removed
    total.rows["heartbeats"] += database.transact(remove_heartbeats, run_id, cut)
    return total


def _prune_contents(database: Database) -> Pruned:
    """Remove contents that no call of any run refers to."""
    total = Pruned()
    unused = database.query(orphans)
    for start in range(0, len(unused), PAGE_CONTENTS):
        total.add(database.transact(remove_contents, unused[start : start + PAGE_CONTENTS]))
    return total


def vacuum(database: Database) -> None:
    """Free the space of removed rows: SQLite rewrites its file, PostgreSQL marks the space as reusable.

    On SQLite, writers wait meanwhile, and the disk needs as much free space as the database has. Raises StoreError when
    it is not possible now.
    """
    with database.connect(writing=False) as conn, faults.reported(database.where):
        if not database.is_sqlite:
            conn.execution_options(isolation_level="AUTOCOMMIT")
            conn.execute(text(f"VACUUM (ANALYZE) {', '.join(metadata.tables)}"))
            return
        raw = conn.connection.driver_connection
        assert raw is not None
        try:
            raw.execute("VACUUM")
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise StoreError(f"{database.where}: cannot be vacuumed now: {error}") from error
