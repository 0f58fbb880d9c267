"""Publishes: the version that an engine should serve, the pending version, and the run's move to it."""

from __future__ import annotations

import time

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json, VersionState
from agentrl.store import events
from agentrl.store import runs as run_records
from agentrl.store.tables import runs, weight_versions
from agentrl.store.training import version_states


def version_to_serve(conn: Connection, run_id: str, reported: int | None) -> int:
    """The version that an engine which reports `reported` should serve: the run's current version, as a rule.

    While any replica publishes the reported version, it is that version, so that no replica undoes the publish. This
    holds for a pending version newer than the current one, and for a published version if the current one was rolled
    back.
    """
    run = conn.execute(select(runs.c.current_version, runs.c.published_step).where(runs.c.id == run_id)).one()
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
    return int(theirs.version) if published else current


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
    events.record(conn, run_id, "publish", {**facts, "start": started_at, "end": time.time()}, "proxy")
