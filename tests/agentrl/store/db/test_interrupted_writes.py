"""Writers that are killed or lose their connection: batches repeat, and no acknowledged write is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import postgres
import pytest
from play import held
from sqlalchemy import Connection, make_url, text

from agentrl.store import Database
from agentrl.store.db.faults import OutcomeUnknown

from .fault_checks import (
    TIMEOUT_S,
    check,
    insert,
    insert_bulk,
    insert_once,
    new_run,
    one_line,
    settle,
    stored,
    terminate_others,
)

# Killed processes

WRITER = """
import os, sys, threading
from agentrl.store import Database
sys.path.insert(0, sys.argv[3])
from fault_checks import insert_bulk
db = Database(sys.argv[1])
def work(name):
    for i in range(10**9):
        kind = db.submit(insert_bulk, sys.argv[2], f"{name}-{i}", 2000).result()
        os.write(1, f"{kind}\\n".encode())
for name in range(4):
    threading.Thread(target=work, args=(name,)).start()
"""


@pytest.mark.parametrize("after", [1, pytest.param(200, marks=pytest.mark.long)])
def test_kill_9_loses_nothing_that_was_acknowledged(db: Database, run_id: str, after: int):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, db.url, run_id, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(postgres.__file__).parent)},
    )
    assert child.stdout is not None
    acknowledged = [child.stdout.readline().strip() for _ in range(after)]
    os.kill(child.pid, signal.SIGKILL)
    acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
    child.wait()
    assert acknowledged[-1]
    check(db, acknowledged)
    assert db.integrity() == []
    again = Database(db.url)  # a new process opens it as it was left
    assert again.submit(insert, run_id, "next").result(TIMEOUT_S) == "next"
    again.close()


# PostgreSQL: connections


def test_a_connection_lost_between_batches_is_replaced(postgresql: Database):
    run_id = new_run(postgresql)
    assert postgresql.submit(insert, run_id, "before").result(TIMEOUT_S) == "before"
    assert terminate_others(postgresql.url) > 0
    assert postgresql.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
    assert postgresql.transact(insert_once, run_id, "transact") == "transact"
    check(postgresql, ["before", "after", "transact"])


def test_a_connection_lost_in_the_middle_of_a_batch_repeats_the_batch(postgresql: Database):
    run_id = new_run(postgresql)
    attempts = []

    def cut_once(conn: Connection) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            assert terminate_others(postgresql.url) > 0
        return insert(conn, run_id, "cut")

    with held(postgresql):
        futures = [postgresql.submit(insert_bulk, run_id, f"a{i}") for i in range(5)]
        futures += [postgresql.submit(insert, run_id, "b"), postgresql.submit(cut_once)]
        futures += [postgresql.submit(insert, run_id, "c")]
    acknowledged, errors = settle(futures)
    assert errors == []
    assert len(attempts) == 2
    assert sorted(stored(postgresql)) == sorted(acknowledged) == ["a0", "a1", "a2", "a3", "a4", "b", "c", "cut"]


def test_transact_repeats_when_its_connection_is_lost(postgresql: Database):
    run_id = new_run(postgresql)
    attempts = []

    def cut_once(conn: Connection) -> str:
        insert_once(conn, run_id, "a")
        attempts.append(1)
        if len(attempts) == 1:
            assert terminate_others(postgresql.url) > 0
        return "done"

    assert postgresql.transact(cut_once) == "done"
    assert len(attempts) == 2
    assert stored(postgresql) == ["a"]


@pytest.fixture
def trap(postgresql: Database) -> Database:
    """A store in which COMMIT cuts the connection when the transaction wrote to the table `trap`."""
    for statement in (
        "CREATE TABLE trap (a INTEGER)",
        "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$",
        "CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON trap DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION cut()",
    ):
        postgresql.transact(lambda conn, statement=statement: conn.exec_driver_sql(statement))
    return postgresql


def test_a_connection_lost_during_commit_fails_units_with_an_unknown_outcome(trap: Database):
    run_id = new_run(trap)
    with held(trap):
        cut = trap.submit(lambda conn: conn.execute(text("INSERT INTO trap VALUES (1)")).rowcount)
        beside = trap.submit(insert, run_id, "beside")
    for future in (cut, beside):
        with pytest.raises(OutcomeUnknown, match="outcome is unknown") as raised:
            future.result(TIMEOUT_S)
        one_line(raised.value)
    assert trap.submit(insert, run_id, "next").result(TIMEOUT_S) == "next"
    check(trap, ["next"])


def test_transact_repeats_after_a_connection_lost_during_commit(trap: Database):
    run_id = new_run(trap)
    attempts = []

    def unit(conn: Connection) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            conn.execute(text("INSERT INTO trap VALUES (1)"))
        return insert_once(conn, run_id, "a")

    assert trap.transact(unit) == "a"
    assert len(attempts) == 2
    assert stored(trap) == ["a"]


def test_a_stopped_process_does_not_hold_its_locks_for_ever(postgresql: Database):
    """Its transaction idles; the server ends it, and what comes back to it is told so, or repeated."""
    run_id = new_run(postgresql)
    attempts = []

    def sleepy(conn: Connection) -> str:
        attempts.append(1)
        insert_once(conn, run_id, "sleepy")
        if len(attempts) == 1:
            conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            with postgres.connect(postgresql.url) as other:
                idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = %s"
                while other.execute(idle, [make_url(postgresql.url).database]).fetchone() != (0,):
                    pass
        return insert_once(conn, run_id, "awake")

    assert postgresql.transact(sleepy) == "awake"
    assert len(attempts) == 2
    assert sorted(stored(postgresql)) == ["awake", "sleepy"]
