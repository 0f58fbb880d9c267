"""The durable checkpoints of steps: their digests, by which a trainer recognises them, and where they are complete.

    written (in the run's folder) ──► stored (in object storage too)

A row stays when retention deletes the checkpoint: it says what was written.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, insert, select, update

from agentrl.domain.schemas import Json, StepState
from agentrl.store.tables import checkpoints, steps
from agentrl.store.training.trainer_epochs import check_epoch


def record(conn: Connection, run_id: str, epoch: int, step_id: str, *, digest: str, size_bytes: int) -> None:
    """Record that a step has a durable checkpoint. Repeating the call is harmless; a step that writes another
    checkpoint has the newer one. Raises FencedError for an older epoch.
    """
    check_epoch(conn, run_id, epoch)
    if digest_of(conn, step_id) == digest:
        return
    conn.execute(delete(checkpoints).where(checkpoints.c.step_id == step_id))
    row = {"step_id": step_id, "digest": digest, "size_bytes": size_bytes, "written_at": time.time()}
    conn.execute(insert(checkpoints).values(row))


def set_stored(conn: Connection, run_id: str, epoch: int, step_ids: list[str]) -> None:
    """Record that object storage has these steps' checkpoints too. Raises FencedError for an older epoch."""
    check_epoch(conn, run_id, epoch)
    new = checkpoints.c.step_id.in_(step_ids), checkpoints.c.stored_at.is_(None)
    conn.execute(update(checkpoints).where(*new).values(stored_at=time.time()))


def digest_of(conn: Connection, step_id: str) -> str | None:
    """The digest of a step's checkpoint; None when none was recorded."""
    return conn.execute(select(checkpoints.c.digest).where(checkpoints.c.step_id == step_id)).scalar()


def newest(conn: Connection, run_id: str) -> Json | None:
    """The newest checkpoint of the surviving lineage, with its step."""
    c = checkpoints.c
    row = conn.execute(
        select(steps.c.step, c.digest, c.size_bytes, c.written_at, c.stored_at)
        .join(steps, steps.c.id == c.step_id)
        .where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
        .order_by(steps.c.id.desc())
        .limit(1)
    ).first()
    return None if row is None else dict(row._mapping)
