"""Retention: remove what was never trained and no lineage needs, a few groups at a time while the run goes on.

A group goes as a whole, with its sessions, calls, rewards and trajectories, when it is rejected, stale or evaluated,
finished before the cut, and none of its trajectories was ever leased or trained, not even by a step that was rolled
back. What a past batch is rebuilt from therefore stays, and so do the run, its tasks, steps and weight versions.
The evaluations of the base weights and of the newest step stay too: the run's summary compares them.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    delete,
    event,
    exists,
    func,
    or_,
    select,
    text,
    true,
    update,
)

from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import InteractionStatus, StepState
from agentrl.errors import StoreError, UserError
from agentrl.store import evaluation_episodes
from agentrl.store.db import faults
from agentrl.store.db.database import Database
from agentrl.store.tables import (
    contents,
    events,
    groups,
    heartbeats,
    interaction_data,
    interactions,
    keys,
    metadata,
    rewards,
    runs,
    sessions,
    step_trajectories,
    steps,
    trajectories,
    trajectory_interactions,
)

PAGE_GROUPS = 32
PAGE_EVENTS = 5000
PAGE_CONTENTS = 5000
HEARTBEATS_KEPT_S = 86400.0
KEPT_EVENTS = ("stopped",)
"""Kinds that stay: a run's total time is added up from them."""
TABLES = (
    "groups",
    "sessions",
    "interactions",
    "interaction_data",
    "rewards",
    "trajectories",
    "trajectory_interactions",
    "contents",
    "events",
    "heartbeats",
)
"""What rows can go from."""
ENDED = ("rejected", "stale", "evaluated")
Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all)."""


@dataclass(slots=True)
class Pruned:
    """Rows that went, or would go, by table, and the bytes of their arrays, messages and bodies."""

    rows: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(TABLES, 0)))
    bytes: int = 0

    def add(self, other: Pruned) -> None:
        """Sum up."""
        self.rows.update(other.rows)
        self.bytes += other.bytes


def cut_before_steps(conn: Connection, run_id: str, keep: int) -> float:
    """The time at which the oldest of the run's `keep` newest steps began; 0 while it has no more steps than that."""
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
    """What `prune` would remove; reads every row of it."""
    kept = database.query(_kept_evaluations, run_id)
    total = Pruned()
    after = ""
    while page := database.query(_candidates, run_id, cut, kept, after):
        total.add(database.query(_measure, page))
        after = page[-1]
    total.add(database.query(_estimate_rest, run_id, cut, kept))
    return total


def prune(database: Database, run_id: str, cut: float, progress: Progress = lambda done, total: None) -> Pruned:
    """Remove what finished before `cut` (seconds since the epoch) and no lineage needs; returns what went.

    Each transaction takes a few groups and lowers the run's counters by them, so that they equal its rows at any
    moment and others wait only for a moment. Stopped half-way it has removed some groups, each as a whole.
    """
    total = Pruned()
    with _without_scans(database) as pruning:
        kept = pruning.query(_kept_evaluations, run_id)
        in_all, done = pruning.query(_count, run_id, cut, kept), 0
        after = ""
        while page := pruning.query(_candidates, run_id, cut, kept, after):
            total.add(pruning.transact(_remove, run_id, cut, kept, page))
            after, done = page[-1], done + len(page)
            progress(min(done, in_all), in_all)
        total.add(_prune_contents(pruning))
    while removed := database.transact(_remove_events, run_id, cut):
        total.rows["events"] += removed
    total.rows["heartbeats"] += database.transact(_remove_heartbeats, run_id, cut)
    return total


def vacuum(database: Database) -> None:
    """Give the space of removed rows back: SQLite rewrites its file, PostgreSQL marks it for use.

    SQLite's writers wait while it lasts, and it needs as much free disk as the database is large. Raises StoreError
    when it cannot be done now.
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


def _prunable(run_id: str, cut: float, kept: Set[str]) -> list[ColumnElement[bool]]:
    needed = exists().where(
        trajectories.c.group_id == groups.c.id,
        or_(
            trajectories.c.lease_step_id.is_not(None),
            exists().where(step_trajectories.c.trajectory_id == trajectories.c.id),
        ),
    )
    return [
        groups.c.run_id == run_id,
        groups.c.state.in_(ENDED),
        groups.c.state != "trained",  # says to the planner that `ix_groups_untrained` holds them all
        groups.c.finished_at < cut,
        groups.c.id.not_in(kept),
        ~needed,
    ]


def _count(conn: Connection, run_id: str, cut: float, kept: Set[str]) -> int:
    statement = select(func.count()).select_from(groups).where(*_prunable(run_id, cut, kept))
    return int(conn.execute(statement).scalar_one())


def _candidates(conn: Connection, run_id: str, cut: float, kept: Set[str], after: str) -> list[str]:
    return list(
        conn.execute(
            select(groups.c.id)
            .where(*_prunable(run_id, cut, kept), groups.c.id > after)
            .order_by(groups.c.id)
            .limit(PAGE_GROUPS)
        ).scalars()
    )


def _kept_evaluations(conn: Connection, run_id: str) -> set[str]:
    """The groups of the surviving lineage's first evaluation, of its newest complete one, and of those after that."""
    found = evaluation_episodes.of_run(conn, run_id)
    newest = max((one.step for one in found if one.complete), default=0)
    kept = {one.version for one in found if one.step == found[0].step or one.step >= newest}
    of_run = select(sessions.c.group_id, sessions.c.metadata).where(
        sessions.c.run_id == run_id, sessions.c.is_eval.is_(True)
    )
    labels = {row.group_id: Label.of(row.metadata) for row in conn.execute(of_run)}
    return {group_id for group_id, label in labels.items() if label is not None and label.version in kept}


def _of_groups(group_ids: Sequence[str]) -> dict[Table, ColumnElement[bool]]:
    """Every table that holds rows of groups, those first that refer to the others."""
    of_session = select(sessions.c.id).where(sessions.c.group_id.in_(group_ids))
    of_call = select(interactions.c.id).where(interactions.c.session_id.in_(of_session))
    of_trajectory = select(trajectories.c.id).where(trajectories.c.group_id.in_(group_ids))
    return {
        trajectory_interactions: trajectory_interactions.c.trajectory_id.in_(of_trajectory),
        trajectories: trajectories.c.group_id.in_(group_ids),
        rewards: rewards.c.session_id.in_(of_session),
        keys: keys.c.session_id.in_(of_session),
        interaction_data: interaction_data.c.interaction_id.in_(of_call),
        interactions: interactions.c.session_id.in_(of_session),
        sessions: sessions.c.group_id.in_(group_ids),
        groups: groups.c.id.in_(group_ids),
    }


def _measure(conn: Connection, group_ids: Sequence[str]) -> Pruned:
    found = Pruned()
    for table, where in _of_groups(group_ids).items():
        found.rows[table.name] += conn.execute(select(func.count()).select_from(table).where(where)).scalar_one()
    data = interaction_data.c
    packed = (data.new_messages, data.answer, data.prompt_delta_ids, data.output_ids, data.logprobs)
    sizes = sum((func.length(column) for column in packed[1:]), start=func.length(packed[0]))
    where = _of_groups(group_ids)[interaction_data]
    found.bytes += int(conn.execute(select(func.coalesce(func.sum(sizes), 0)).where(where)).scalar_one())
    return found


def _estimate_rest(conn: Connection, run_id: str, cut: float, kept: Set[str]) -> Pruned:
    """What goes after the groups: contents that only they refer to, old events and heartbeats."""
    going = select(sessions.c.id).where(
        sessions.c.group_id.in_(select(groups.c.id).where(*_prunable(run_id, cut, kept)))
    )
    orphans = conn.execute(
        select(func.count(), func.coalesce(func.sum(func.length(contents.c.body)), 0)).where(
            *_orphaned(interactions.c.session_id.not_in(going))
        )
    ).one()
    found = Pruned(Counter({"contents": orphans[0]}), orphans[1])
    for table, where in ((events, _old_events(run_id, cut)), (heartbeats, _old_heartbeats(run_id, cut))):
        found.rows[table.name] += conn.execute(select(func.count()).select_from(table).where(*where)).scalar_one()
    return found


def _remove(conn: Connection, run_id: str, cut: float, kept: Set[str], group_ids: Sequence[str]) -> Pruned:
    """Remove those of the groups that may still go, and lower the run's counters. Safe to repeat."""
    # Sessions first, as everybody who locks does: a late reward waits here, and then finds no session.
    _lock(conn, select(sessions.c.id).where(sessions.c.group_id.in_(group_ids)).order_by(sessions.c.id))
    going = select(groups.c.id, groups.c.is_eval).where(*_prunable(run_id, cut, kept), groups.c.id.in_(group_ids))
    rows = conn.execute(going.order_by(groups.c.id).with_for_update(of=groups)).all()
    ids = [row.id for row in rows]
    removed = _measure(conn, ids)
    for table, where in _of_groups(ids).items():
        conn.execute(delete(table).where(where))
    counted = sum(not row.is_eval for row in rows)
    if counted:
        conn.execute(
            update(runs)
            .where(runs.c.id == run_id)
            .values(admitted=runs.c.admitted - counted, returned=runs.c.returned - counted)
        )
    return removed


def _lock(conn: Connection, statement: Select[Any]) -> None:
    conn.execute(statement.with_for_update()).all()


def _prune_contents(database: Database) -> Pruned:
    """Remove contents that no call of any run refers to."""
    total = Pruned()
    orphans = database.query(_orphans)
    for start in range(0, len(orphans), PAGE_CONTENTS):
        total.add(database.transact(_remove_contents, orphans[start : start + PAGE_CONTENTS]))
    return total


def _used() -> list[Select[Any]]:
    columns = (interactions.c.tools_hash, interactions.c.system_hash)
    return [select(column).where(column.is_not(None)) for column in columns]


def _orphaned(condition: ColumnElement[bool] = true()) -> list[ColumnElement[bool]]:
    """Contents that no call refers to, of those calls for which `condition` holds."""
    return [contents.c.hash.not_in(used.where(condition)) for used in _used()]


def _orphans(conn: Connection) -> list[str]:
    return list(conn.execute(select(contents.c.hash).where(*_orphaned())).scalars())


def _remove_contents(conn: Connection, hashes: Sequence[str]) -> Pruned:
    if conn.dialect.name != "sqlite":  # a call that is being recorded has its content, and is not seen yet: wait for it
        conn.execute(text("LOCK TABLE contents IN SHARE ROW EXCLUSIVE MODE"))
    going = conn.execute(
        select(contents.c.hash, func.length(contents.c.body).label("size")).where(
            contents.c.hash.in_(hashes), *_orphaned()
        )
    ).all()
    conn.execute(delete(contents).where(contents.c.hash.in_([row.hash for row in going])))
    return Pruned(Counter({"contents": len(going)}), sum(row.size for row in going))


def _old_events(run_id: str, cut: float) -> list[ColumnElement[bool]]:
    return [events.c.run_id == run_id, events.c.created_at < cut, events.c.kind.not_in(KEPT_EVENTS)]


def _old_heartbeats(run_id: str, cut: float) -> list[ColumnElement[bool]]:
    """Of those who were silent for a day: a sweep still needs the others to know who is dead."""
    silent = min(cut, time.time() - HEARTBEATS_KEPT_S)
    serving = select(interactions.c.replica).where(interactions.c.status == InteractionStatus.RUNNING)
    return [
        heartbeats.c.run_id == run_id,
        heartbeats.c.last_seen_at < silent,
        heartbeats.c.name.not_in(serving),
    ]


def _remove_events(conn: Connection, run_id: str, cut: float) -> int:
    page = select(events.c.id).where(*_old_events(run_id, cut)).limit(PAGE_EVENTS)
    return conn.execute(delete(events).where(events.c.id.in_(page))).rowcount


def _remove_heartbeats(conn: Connection, run_id: str, cut: float) -> int:
    return conn.execute(delete(heartbeats).where(*_old_heartbeats(run_id, cut))).rowcount


_PRUNE_LOCK = 0x61677072  # PostgreSQL advisory lock
_REFERENCES = {
    "tmp_prune_parent": "interactions (parent_id) WHERE parent_id IS NOT NULL",
    "tmp_prune_tools": "interactions (tools_hash) WHERE tools_hash IS NOT NULL",
    "tmp_prune_system": "interactions (system_hash) WHERE system_hash IS NOT NULL",
    "tmp_prune_reward": "rewards (interaction_id) WHERE interaction_id IS NOT NULL",
    "tmp_prune_leaf": "trajectories (leaf_id)",
}
"""Foreign keys without an index, which recording does not need: each row removed would scan the table."""


@contextmanager
def _without_scans(database: Database) -> Iterator[Database]:
    """The database as the pruner uses it: checking foreign keys of what is removed scans no table.

    SQLite: connections of its own that do not check them; groups go as a whole, and so leave nothing behind that would
    refer to them. PostgreSQL: indexes for as long as it lasts, built and dropped without locking writers out. Raises
    UserError while another prune is on.
    """
    if database.is_sqlite:
        own = Database(database.url)
        event.listen(own.engine, "connect", lambda raw, _record: raw.execute("PRAGMA foreign_keys=OFF"))
        try:
            yield own
        finally:
            own.close()
        return
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        if not conn.execute(select(func.pg_try_advisory_lock(_PRUNE_LOCK))).scalar_one():
            raise UserError("another `agentrl store prune` is at work on this database: wait for it")
        try:
            _drop_indexes(conn)  # a prune that was killed left them
            for name, columns in _REFERENCES.items():
                conn.execute(text(f"CREATE INDEX CONCURRENTLY {name} ON {columns}"))
            yield database
        finally:
            _drop_indexes(conn)
            conn.execute(select(func.pg_advisory_unlock(_PRUNE_LOCK)))


def _drop_indexes(conn: Connection) -> None:
    for name in _REFERENCES:
        conn.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
