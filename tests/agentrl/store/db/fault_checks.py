"""Writes to a database that fails, and the checks of every fault: acknowledged work is stored, and nothing twice."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import postgres
import pytest
from sqlalchemy import Connection, select

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.store import Database, events, runs
from agentrl.store.db.bulk_unit import bulk_unit

TIMEOUT_S = 90  # longer than a fault is waited for
RUN = {"name": "test", "config": {}, "task_data": [{}], "base_model": "tiny", "key": "k", "seed": 0, "steps": 1}


def insert(conn: Connection, run_id: str, kind: str, size: int = 0) -> str:
    """Not safe to repeat: a second run would be a second row."""
    events.record(conn, run_id, kind, {"pad": "x" * size}, "test")
    return kind


def insert_many(conn: Connection, items: list[tuple[Any, ...]]) -> list[str]:
    return [insert(conn, *item) for item in items]


@bulk_unit(many=insert_many)
def insert_bulk(conn: Connection, run_id: str, kind: str, size: int = 0) -> str:
    return insert(conn, run_id, kind, size)


def insert_once(conn: Connection, run_id: str, kind: str) -> str:
    """Safe to repeat, as `transact` wants it."""
    if conn.scalar(select(events.events.c.id).where(events.events.c.kind == kind)) is None:
        insert(conn, run_id, kind)
    return kind


def stored(db: Database) -> list[str]:
    return db.query(lambda conn: list(conn.scalars(select(events.events.c.kind))))


def settle(futures: Iterable[Future[str]]) -> tuple[set[str], list[BaseException]]:
    """What was acknowledged, and the errors of the rest."""
    acknowledged, errors = set(), []
    for future in futures:
        if error := future.exception(TIMEOUT_S):
            errors.append(error)
        else:
            acknowledged.add(future.result())
    return acknowledged, errors


def check(db: Database, acknowledged: Iterable[str]) -> None:
    """The property of every test here."""
    kinds = stored(db)
    assert len(kinds) == len(set(kinds)), "stored twice"
    assert set(acknowledged) <= set(kinds), "acknowledged, but not stored"


def one_line(error: BaseException) -> str:
    assert isinstance(error, StoreError)
    assert "\n" not in str(error)
    return str(error)


def terminate_others(url: str) -> int:
    """Cut every connection to a PostgreSQL database; how many there were."""
    with postgres.connect(url) as conn:
        cut = conn.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int((cut.fetchone() or [0])[0])


def open_store(url: str) -> tuple[Database, str]:
    """A migrated store with a run."""
    db = Database(url)
    db.upgrade()
    with db.write() as conn:
        return db, runs.create(conn, **RUN)


def new_run(db: Database) -> str:
    with db.write() as conn:
        return runs.create(conn, **RUN)


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A folder on a file system of this size."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-disk-", dir="/tmp"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("mounting a small file system is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def fill_up(db: Database, run_id: str, most: int = 20_000) -> tuple[set[str], list[BaseException]]:
    """Submit batches until one fails."""
    acknowledged: set[str] = set()
    for start in range(0, most, 50):
        done, errors = settle([db.submit(insert_bulk, run_id, str(start + i), 900) for i in range(50)])
        acknowledged |= done
        if errors:
            return acknowledged, errors
    raise AssertionError("the disk never became full")


def refusals(db: Database, run_id: str) -> list[BaseException]:
    """The errors of one write in each way."""
    with pytest.raises(StoreError) as raised:
        db.transact(insert, run_id, "never")
    _, errors = settle([db.submit(insert, run_id, "never"), db.submit(insert, run_id, "never")])
    assert len(errors) == 2
    assert not any(isinstance(error, StoreUnavailable) for error in (raised.value, *errors))
    return [raised.value, *errors]
