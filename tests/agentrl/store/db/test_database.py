"""Transactions, reads and checks of a database."""

import threading

import pytest
from play import held
from sqlalchemy import select, text
from stored_events import TIMEOUT_S, explode, insert, stored

from agentrl.errors import StoreError
from agentrl.store import Database, events


def test_a_swallowed_failure_never_counts_as_stored(databases, request):
    """PostgreSQL answers COMMIT with a silent ROLLBACK when a statement before it had failed."""
    with databases.lent("postgresql") as url:
        db = Database(url)
        request.addfinalizer(db.close)

        def careless(conn):
            conn.execute(text("CREATE TABLE lost (a INTEGER)"))
            try:
                conn.execute(text("SELECT * FROM nowhere"))
            except Exception:  # noqa: BLE001 - the mistake that this test is about
                return "stored"

        for run in (db.transact, lambda unit: db.submit(unit).result(TIMEOUT_S)):
            with pytest.raises(StoreError, match="nothing was stored"):
                run(careless)


def test_transact_returns_once_it_is_committed(db, run_id):
    assert db.transact(insert, run_id, kind="a") == "a"
    assert stored(db) == ["a"]
    with pytest.raises(ValueError, match="boom"):
        db.transact(explode, run_id)
    assert stored(db) == ["a"]


def test_query_reads_committed_rows(db, run_id):
    db.transact(insert, run_id, "a")
    assert [row.kind for row in db.query(events.of_run, run_id, kind="a")] == ["a"]


@pytest.mark.parametrize("how", ["transact", "submit"])
def test_a_deadlock_is_repeated(databases, how, request):
    """Two databases' transactions take two rows in opposite orders; PostgreSQL breaks one, which runs again."""
    with databases.lent("postgresql") as url:
        pair = [Database(url), Database(url)]
        for db in pair:
            request.addfinalizer(db.close)
        pair[0].transact(
            lambda conn: conn.execute(text("CREATE TABLE a AS SELECT i, 0 AS n FROM generate_series(0, 1) i"))
        )
        locked = [threading.Event(), threading.Event()]
        runs = []

        def take_both(conn, first):
            runs.append(first)
            conn.execute(text("UPDATE a SET n = n + 1 WHERE i = :i"), {"i": first})
            locked[first].set()
            assert locked[1 - first].wait(TIMEOUT_S)
            conn.execute(text("UPDATE a SET n = n + 1 WHERE i = :i"), {"i": 1 - first})
            return first

        if how == "submit":
            extra = []
            with held(pair[0]):
                futures = [pair[0].submit(take_both, 0), pair[1].submit(take_both, 1)]
                extra.append(pair[0].submit(lambda conn: "other"))
            assert extra[0].result(TIMEOUT_S) == "other"
            assert [f.result(TIMEOUT_S) for f in futures] == [0, 1]
        else:
            results = []
            threads = [
                threading.Thread(target=lambda i=i: results.append(pair[i].transact(take_both, i))) for i in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert sorted(results) == [0, 1]
        assert len(runs) > 2
        assert pair[0].query(lambda conn: list(conn.scalars(text("SELECT n FROM a")))) == [2, 2]


def test_a_sound_database_has_no_problems(db, run_id):
    db.transact(insert, run_id, "a")
    assert db.integrity() == []


def test_integrity_names_rows_whose_parent_is_missing(databases):
    with databases.lent("sqlite") as url:
        db = Database(url)
        with db.engine.connect() as conn:
            raw = conn.connection.driver_connection
            raw.execute("PRAGMA foreign_keys=OFF")
            raw.execute("INSERT INTO tasks (id, run_id, position, data) VALUES ('t', 'no such run', 0, '{}')")
        assert db.integrity() == ["tasks, row 1: its runs is missing"]
        db.close()


def test_integrity_names_an_invalid_index(databases):
    with databases.lent("postgresql") as url:
        db = Database(url)
        db.transact(
            lambda conn: conn.execute(
                text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pk_runs'::regclass")
            )
        )
        assert db.integrity() == ["index pk_runs is invalid: REINDEX it"]
        db.close()


def test_a_read_sees_one_snapshot(db, run_id):
    with db.read() as conn:
        before = conn.execute(select(events.events.c.kind)).all()
        db.transact(insert, run_id, "meanwhile")
        assert conn.execute(select(events.events.c.kind)).all() == before
    assert stored(db) == ["meanwhile"]
