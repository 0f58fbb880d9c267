"""Trainer epochs: starting a trainer ends the epochs before its own.

A trainer of an older epoch gets FencedError from every writing call.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select, update

from agentrl.errors import FencedError
from agentrl.store.tables import runs as runs_table


def begin_epoch(conn: Connection, run_id: str) -> int:
    """Start a new trainer epoch, which fences every older trainer of the run."""
    return int(
        conn.execute(
            update(runs_table)
            .where(runs_table.c.id == run_id)
            .values(trainer_epoch=runs_table.c.trainer_epoch + 1)
            .returning(runs_table.c.trainer_epoch)
        ).scalar_one()
    )


def check_epoch(conn: Connection, run_id: str, epoch: int) -> Row[Any]:
    """The run, locked. Raises FencedError when a newer trainer has started."""
    run = lock_run(conn, run_id)
    if run.trainer_epoch != epoch:
        raise FencedError(f"trainer epoch {epoch} is over: epoch {run.trainer_epoch} has started")
    return run


def lock_run(conn: Connection, run_id: str) -> Row[Any]:
    """Lock the run's row, so that leases, completions, publishes and resumes of a run run one at a time."""
    return conn.execute(select(runs_table).where(runs_table.c.id == run_id).with_for_update(key_share=True)).one()
