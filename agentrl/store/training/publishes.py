"""Publishes: the version that an engine should serve, the pending version, and the run's move to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, select

from agentrl.domain.schemas import Json, VersionState
from agentrl.store import events
from agentrl.store import runs as run_records
from agentrl.store.db import clock
from agentrl.store.tables import memory_leases, runs, weight_versions
from agentrl.store.training import version_states


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version and adapters that an engine should hold."""

    version: int  # that it should serve when it has weights
    released: bool = False  # it should have no weights now: it is the trainer's turn on the GPUs, or a publish begins
    expired: bool = False  # the trainer's turn has just ended, because it was not renewed


def version_to_serve(conn: Connection, run_id: str, reported: int | None, lag: int = 0) -> Wanted:
    """The version that an engine should serve if it reports `reported`: the run's current version, as a rule.

    With a `lag`, it may keep one of the `within_lag` versions of the current one.

    While any replica publishes the reported version, it is that version, so that no replica undoes the publish. This
    holds for a pending version newer than the current one, and for a published version if the current one was rolled
    back. An engine without weights waits for the publish by which the trainer ends its turn; if that takes too long, it
    should serve the publish's version.
    """
    lasts = memory_leases.c.until > clock.now()
    run = conn.execute(
        select(
            runs.c.current_version,
            runs.c.published_step,
            memory_leases.c.epoch,
            memory_leases.c.version.label("handed"),
            lasts.label("lasts"),
        )
        .join_from(runs, memory_leases, memory_leases.c.run_id == runs.c.id, isouter=True)
        .where(runs.c.id == run_id)
    ).one()
    version = _version_to_serve(conn, run_id, run, run.handed if reported is None else reported, lag)
    if run.epoch is None:
        return Wanted(version)
    is_turn = run.handed is None
    return Wanted(
        version, released=bool(run.lasts) and (is_turn or reported is None), expired=is_turn and not run.lasts
    )


def _version_to_serve(conn: Connection, run_id: str, run: Row[Any], reported: int | None, lag: int) -> int:
    current = int(run.current_version)
    theirs = None if reported is None or reported == current else run_records.version(conn, run_id, reported)
    if theirs is None:
        return current
    if theirs.state == VersionState.PENDING:
        published = theirs.version > current and theirs.step >= run.published_step
    else:
        ours = run_records.version(conn, run_id, current)
        published = (
            theirs.state == VersionState.PUBLISHED and ours is not None and ours.state == VersionState.ROLLED_BACK
        )
    published = published or theirs.version in within_lag(conn, run_id, current, lag)
    return int(theirs.version) if published else current


def within_lag(conn: Connection, run_id: str, version: int, lag: int) -> set[int]:
    """The versions that an engine may keep while the run's is `version`: its last `lag` ancestors, if published."""
    kept: set[int] = set()
    row = run_records.version(conn, run_id, version)
    for _ in range(lag):
        if row is None or row.parent_version is None:
            break
        row = run_records.version(conn, run_id, row.parent_version)
        if row is None or row.state != VersionState.PUBLISHED:
            break
        kept.add(int(row.version))
    return kept


def target(conn: Connection, run_id: str) -> tuple[int, str | None, str | None] | None:
    """The version, folder and checksum to which engines that are behind the run change.

    None while there is none: the run's version was rolled back, or the engines' memory is a trainer's.
    """
    leased = select(memory_leases.c.run_id).where(memory_leases.c.run_id == run_id)
    row = conn.execute(
        select(weight_versions.c.version, weight_versions.c.path, weight_versions.c.checksum)
        .join(runs, runs.c.id == weight_versions.c.run_id)
        .where(weight_versions.c.run_id == run_id, weight_versions.c.version == runs.c.current_version)
        .where(weight_versions.c.state == VersionState.PUBLISHED, ~leased.exists())
    ).first()
    return None if row is None else (int(row.version), row.path, row.checksum)


def undone(conn: Connection, run_id: str, version: int) -> bool:
    """Whether a version newer than `version` was rolled back. Engines may have returned from it to `version`."""
    newer = select(weight_versions.c.version).where(
        weight_versions.c.run_id == run_id,
        weight_versions.c.version > version,
        weight_versions.c.state == VersionState.ROLLED_BACK,
    )
    return conn.execute(newer.limit(1)).first() is not None


def pending(conn: Connection, run_id: str) -> int | None:
    """The newest version that is durable but not published, unless the run has published a later step."""
    return conn.execute(
        select(weight_versions.c.version)
        .join(runs, runs.c.id == weight_versions.c.run_id)
        .where(weight_versions.c.run_id == run_id, weight_versions.c.state == VersionState.PENDING)
        .where(weight_versions.c.step >= runs.c.published_step)
        .order_by(weight_versions.c.version.desc())
        .limit(1)
    ).scalar()


def complete(conn: Connection, run_id: str, version: int, epoch: int | None, facts: Json, started_at: float) -> None:
    """Move the run to `version` and record the publish, with its `facts`, in the run's timeline.

    Raises the errors of `version_states.mark_published`.
    """
    version_states.mark_published(conn, run_id, version, epoch)
    conn.execute(delete(memory_leases).where(memory_leases.c.run_id == run_id, memory_leases.c.version == version))
    events.record(conn, run_id, "publish", {**facts, "start": started_at, "end": time.time()}, "proxy")
