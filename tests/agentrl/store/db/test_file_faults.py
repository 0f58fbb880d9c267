"""A SQLite file that is read-only, locked, full, cut off or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import postgres
import pytest
from sqlalchemy import Connection, event, make_url, text

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.store import Database, events
from agentrl.store.db import faults, sql_engines

from .fault_checks import (
    TIMEOUT_S,
    check,
    fill_up,
    insert,
    insert_bulk,
    insert_once,
    new_run,
    one_line,
    open_store,
    refusals,
    settle,
    small_disk,
    stored,
)


def test_a_read_only_file_is_reported(sqlite: Database):
    run_id = new_run(sqlite)
    read_only = Database(f"sqlite:///file:{make_url(sqlite.url).database}?mode=ro&uri=true")
    for error in refusals(read_only, run_id):
        assert "read-only" in one_line(error)
    assert read_only.query(events.of_run, run_id) == []
    read_only.close()


LOCKER = """
import sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
conn.execute("ROLLBACK")
"""


@contextmanager
def locked(db: Database) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the write lock until it reads a line, or the block ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(make_url(db.url).database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    try:
        yield child
    finally:
        child.communicate("\n", timeout=TIMEOUT_S)


@pytest.mark.usefixtures("impatient")
def test_a_file_that_stays_locked_is_reported(databases):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        with locked(db):
            with pytest.raises(StoreUnavailable, match="locked by another process"):
                db.transact(insert, run_id, "never")
            _, errors = settle([db.submit(insert, run_id, f"never{i}") for i in range(3)])
            for error in errors:
                assert isinstance(error, StoreUnavailable)
                assert "locked by another process" in one_line(error)
            assert len(errors) == 3
            assert stored(db) == []  # readers do not wait
        assert db.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
        assert stored(db) == ["after"]
        db.close()


def test_a_file_that_is_unlocked_in_time_delays_and_loses_nothing(databases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sql_engines, "BUSY_TIMEOUT_MS", 50)
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        refused = threading.Barrier(3)  # both writers were, at least once
        met = threading.local()

        def meet(*args: Any, **kwargs: Any) -> StoreError:
            if not hasattr(met, "once"):
                met.once = refused.wait(TIMEOUT_S)
            return told(*args, **kwargs)

        told = faults.store_error
        monkeypatch.setattr(faults, "store_error", meet)
        results: list[str] = []
        with locked(db) as child:
            future = db.submit(insert, run_id, "submitted")
            thread = threading.Thread(target=lambda: results.append(db.transact(insert_once, run_id, "transact")))
            thread.start()
            refused.wait(TIMEOUT_S)
            assert not future.done()
            child.stdin.write("\n")
            child.stdin.flush()
            assert future.result(TIMEOUT_S) == "submitted"
            thread.join(TIMEOUT_S)
        assert results == ["transact"]
        assert sorted(stored(db)) == ["submitted", "transact"]
        db.close()


def test_a_full_file_is_reported_and_grows_again_with_space(sqlite: Database):
    run_id = new_run(sqlite)
    limit = [200]

    @event.listens_for(sqlite.engine, "begin")
    def _limit(conn: Connection) -> None:
        raw = conn.connection.driver_connection
        raw.execute(f"PRAGMA max_page_count = {limit[0]}").fetchall()

    acknowledged, errors = fill_up(sqlite, run_id)
    assert len(errors) == 50  # the whole batch
    for error in errors:
        assert "disk is full, and nothing was stored: free space" in one_line(error)
    check(sqlite, acknowledged)
    limit[0] = 100_000
    assert sqlite.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
    assert set(stored(sqlite)) == acknowledged | {"after"}
    assert sqlite.integrity() == []


def test_a_full_disk_loses_nothing_and_the_writer_resumes_with_space():
    with small_disk("3m") as folder:
        (folder / "ballast").write_bytes(bytes(500_000))
        db, run_id = open_store(f"sqlite:///{folder}/store.db")
        acknowledged, errors = fill_up(db, run_id)
        assert "disk" in one_line(errors[0])
        check(db, acknowledged)
        (folder / "ballast").unlink()
        assert db.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
        check(db, [*acknowledged, "after"])
        assert db.integrity() == []
        db.close()


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[3])
from fault_checks import fill_up
from agentrl.store import Database
db = Database(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
acknowledged, errors = fill_up(db, sys.argv[2])
print(errors[0])
print(*acknowledged)
"""


def test_a_file_size_limit_is_reported_and_loses_nothing(sqlite: Database):
    run_id = new_run(sqlite)
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, sqlite.url, run_id, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(postgres.__file__).parent)},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    error, acknowledged = child.stdout.splitlines()
    assert "file-size limits" in error or "disk is full" in error
    assert acknowledged
    check(sqlite, acknowledged.split())
    assert sqlite.integrity() == []


@pytest.mark.parametrize(
    "part", [0.0, pytest.param(0.01, marks=pytest.mark.long), pytest.param(0.5, marks=pytest.mark.long), 0.99]
)
def test_a_truncated_store_is_not_opened(databases, part: float):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        settle(db.submit(insert_bulk, run_id, str(i), 1000) for i in range(200))
        db.close()
        file = Path(str(make_url(url).database))
        os.truncate(file, int(file.stat().st_size * part))
        with pytest.raises(StoreError, match=r"(is empty|is cut off).*restore a backup") as raised:
            Database(url)
        one_line(raised.value)


def test_a_store_with_a_damaged_page_is_reported(databases):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        settle(db.submit(insert_bulk, run_id, str(i), 1000) for i in range(200))
        root = db.query(lambda conn: conn.scalar(text("SELECT rootpage FROM sqlite_master WHERE name = 'events'")))
        db.close()
        with Path(str(make_url(url).database)).open("r+b") as file:
            file.seek((root - 1) * 4096)
            file.write(b"\xa5" * 4096)
        db = Database(url)
        assert db.integrity() != []
        with pytest.raises(StoreError, match=r"damaged.*restore a backup") as raised:
            db.query(events.of_run, run_id)
        one_line(raised.value)
        _, errors = settle([db.submit(insert, run_id, "never")])
        assert "damaged" in one_line(errors[0])
        db.close()
