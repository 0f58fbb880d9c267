"""Runs and their weight versions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, func, insert, select, update

from agentrl.domain import staleness
from agentrl.domain.schemas import TRAINED, Json, VersionState
from agentrl.errors import UserError, did_you_mean
from agentrl.store import events, task_rows
from agentrl.store.db.codec import hash_key, new_id
from agentrl.store.tables import groups, replays, runs, steps, trajectories, weight_versions
from agentrl.store.task_rows import NewSource


def create(
    conn: Connection,
    *,
    name: str,
    config: Json,
    task_data: list[Json] | None = None,
    sources: Sequence[NewSource] = (),
    base_model: str,
    key: str,
    seed: int,
    steps: int,
) -> str:
    """Insert a run and its base weights (version 0); returns its id.

    Its tasks are `task_data`, or are stored later (`sources`), or outside programs bring them. Raises UserError on a
    taken name.
    """
    if conn.execute(select(runs.c.id).where(runs.c.name == name)).first():
        raise UserError(f"a run named {name!r} already exists in this database")
    run_id, now = new_id(), time.time()
    conn.execute(
        insert(runs).values(
            id=run_id,
            name=name,
            config=config,
            base_model=base_model,
            status="running",
            key_hash=hash_key(key),
            seed=seed,
            target_steps=steps,
            created_at=now,
        )
    )
    if task_data:
        task_rows.add_complete(conn, run_id, task_data)
    elif sources:
        task_rows.add_sources(conn, run_id, sources)
    conn.execute(
        insert(weight_versions).values(
            run_id=run_id,
            version=0,
            parent_version=None,
            step=0,
            path=None,
            state=VersionState.PUBLISHED,
            created_at=now,
            published_at=now,
        )
    )
    return run_id


def reopen(conn: Connection, run_id: str, *, key: str, config: Json, steps: int) -> None:
    """Resume a run under a new run key; a finished run continues if `steps` grew."""
    row = get(conn, run_id)
    done = row.status == "finished" and steps <= row.target_steps
    conn.execute(
        update(runs)
        .where(runs.c.id == run_id)
        .values(
            key_hash=hash_key(key),
            config=config,
            target_steps=steps,
            status="finished" if done else "running",
            finished_at=row.finished_at if done else None,
            error=None,
        )
    )
    events.record(conn, run_id, events.REOPENED, {}, "store")


def set_steps(conn: Connection, run_id: str, steps: int, config: Json) -> None:
    """Set the number of a run's steps, which is known when all of its tasks are stored."""
    conn.execute(update(runs).where(runs.c.id == run_id).values(target_steps=steps, config=config))


def resume(conn: Connection, run_id: str) -> None:
    """Let a stopped or failed run take groups again; earlier failed sessions no longer count.

    Raises UserError for a finished run.
    """
    row = get(conn, run_id)
    if row.status == "finished":
        raise UserError(f"run {row.name} is finished: it has all its {row.target_steps} steps")
    values: Json = {"status": "running", "finished_at": None, "error": None}
    conn.execute(update(runs).where(runs.c.id == run_id).values(values))
    events.record(conn, run_id, events.REOPENED, {}, "store")


def by_name(conn: Connection, name: str) -> Row[Any]:
    """The run called `name`. Raises UserError with the nearest name, and how to create a run."""
    row = conn.execute(select(runs).where(runs.c.name == name)).first()
    if row is None:
        names = list(conn.execute(select(runs.c.name)).scalars())
        hint = did_you_mean(name, names) if names else "; the database holds no run"
        raise UserError(f"no run named {name!r}{hint} (`agentrl run create` makes one)")
    return row


def find(conn: Connection, name: str) -> Row[Any] | None:
    """The run called `name`, or None."""
    return conn.execute(select(runs).where(runs.c.name == name)).first()


def get(conn: Connection, run_id: str) -> Row[Any]:
    """The run with this id; it must exist."""
    return conn.execute(select(runs).where(runs.c.id == run_id)).one()


def all_runs(conn: Connection) -> list[Row[Any]]:
    """Every run, newest first."""
    return list(conn.execute(select(runs).order_by(runs.c.id.desc())))


def set_status(conn: Connection, run_id: str, status: str, error: str | None = None) -> None:
    """Move a run to `status`."""
    finished_at = time.time() if status in ("finished", "failed") else None
    conn.execute(update(runs).where(runs.c.id == run_id).values(status=status, error=error, finished_at=finished_at))


def version(conn: Connection, run_id: str, number: int) -> Row[Any] | None:
    """One weight version."""
    return conn.execute(
        select(weight_versions).where(weight_versions.c.run_id == run_id, weight_versions.c.version == number)
    ).first()


def young_ages(conn: Connection, run_id: str, number: int, max_staleness: int) -> dict[int, int]:
    """Versions young enough for a step that starts from version `number` → their ages.

    Only the newest versions are read: a version younger than an ancestor has a larger number.
    """
    oldest = number
    for _ in range(max_staleness):
        row = version(conn, run_id, oldest)
        if row is None or row.parent_version is None:
            break
        oldest = row.parent_version
    rows = conn.execute(
        select(weight_versions.c.version, weight_versions.c.parent_version).where(
            weight_versions.c.run_id == run_id, weight_versions.c.version >= oldest
        )
    )
    ages = staleness.ages(number, {row.version: row.parent_version for row in rows})
    return {v: age for v, age in ages.items() if age <= max_staleness}


def version_parents(conn: Connection, run_id: str) -> dict[int, int | None]:
    """Version → parent, for `staleness.ages`."""
    rows = conn.execute(
        select(weight_versions.c.version, weight_versions.c.parent_version).where(weight_versions.c.run_id == run_id)
    )
    return {row.version: row.parent_version for row in rows}


def newest_versions(conn: Connection, run_id: str, most: int) -> list[int]:
    """The newest versions of the surviving lineage, newest first."""
    of_run = select(weight_versions.c.version).where(weight_versions.c.run_id == run_id)
    surviving = of_run.where(weight_versions.c.state != VersionState.ROLLED_BACK)
    return list(conn.execute(surviving.order_by(weight_versions.c.version.desc()).limit(most)).scalars())


def ready_groups(conn: Connection, run_id: str) -> int:
    """How many groups are ready for a lease."""
    ready = (groups.c.run_id == run_id, groups.c.state == "ready", groups.c.state != "trained")
    return int(conn.execute(select(func.count()).select_from(groups).where(*ready)).scalar_one())


def trained_again(conn: Connection, run_id: str) -> Row[Any]:
    """What steps trained once more, which is in the sums of more than one step: `groups`, `trajectories`, and
    `tokens`, those of trajectories that were too old by then included.
    """
    of_group = (
        select(
            func.sum(case((replays.c.stale, 0), else_=1)).label("trajectories"),
            func.sum(trajectories.c.trainable_tokens).label("tokens"),
        )
        .select_from(replays)
        .join(steps, steps.c.id == replays.c.step_id)
        .join(trajectories, trajectories.c.id == replays.c.trajectory_id)
        .where(steps.c.run_id == run_id, steps.c.state.in_(TRAINED))
        .group_by(replays.c.step_id, trajectories.c.group_id)
        .subquery()
    )
    return conn.execute(
        select(
            func.count().label("groups"),
            func.coalesce(func.sum(of_group.c.trajectories), 0).label("trajectories"),
            func.coalesce(func.sum(of_group.c.tokens), 0).label("tokens"),
        ).select_from(of_group)
    ).one()


def state_counts(conn: Connection, run_id: str) -> Json:
    """How many groups and trajectories are in each state.

    Trained ones are summed from the steps; the rest is counted in a partial index of untrained rows, so the cost grows
    only with rows that never train (a quarter of a microsecond each). Frequent callers use `ready_groups`.
    """
    trained = conn.execute(
        select(
            func.coalesce(func.sum(steps.c.groups), 0).label("groups"),
            func.coalesce(func.sum(steps.c.trajectories), 0).label("trajectories"),
        ).where(steps.c.run_id == run_id, steps.c.state.in_(TRAINED))
    ).one()
    again = trained_again(conn, run_id)
    counts: Json = {}
    for table, of_steps in (
        (groups, trained.groups - again.groups),
        (trajectories, trained.trajectories - again.trajectories),
    ):
        untrained = conn.execute(
            select(table.c.state, func.count())
            .where(table.c.run_id == run_id, table.c.state != "trained")
            .group_by(table.c.state)
        )
        counts[table.name] = {row[0]: row[1] for row in untrained} | ({"trained": int(of_steps)} if of_steps else {})
    return counts
