"""Transactions and the group commit: only durable work is acknowledged, and a failing unit fails alone."""

import threading
import traceback
from concurrent.futures import CancelledError

import pytest
from play import held
from sqlalchemy import event, make_url, select, text

from agentrl.errors import StoreError, UserError
from agentrl.store import Database, events
from agentrl.store.db import revisions
from agentrl.store.db.bulk_unit import BulkUnit

TIMEOUT_S = 30


def insert(conn, run_id, kind):
    events.record(conn, run_id, kind, {}, "test")
    return kind


def explode(conn, run_id):
    events.record(conn, run_id, "never", {}, "test")
    raise ValueError("boom")


def stored(db):
    with db.read() as conn:
        return [row.kind for row in conn.execute(select(events.events.c.kind).order_by(events.events.c.id))]


@pytest.fixture
def bulk():
    """A unit with a bulk form, and the sizes of its bulk calls; `bad` fails its item, `worse` the whole call."""
    sizes = []

    def unit(conn, run_id, kind):
        if kind in ("bad", "worse"):
            raise ValueError(kind)
        return insert(conn, run_id, kind)

    def many(conn, items):
        sizes.append(len(items))
        results = []
        for run_id, kind in items:
            if kind == "worse":
                insert(conn, run_id, "of the call that failed")
                raise RuntimeError("many")
            results.append(ValueError(kind) if kind == "bad" else unit(conn, run_id, kind))
        return results

    made = BulkUnit(unit, many)
    made.sizes = sizes
    return made


def test_a_failing_unit_rolls_back_alone(db, run_id):
    with held(db):
        good = [db.submit(insert, run_id, str(i)) for i in range(20)]
        bad = db.submit(explode, run_id)
        more = db.submit(insert, run_id, "last")
    assert [f.result(TIMEOUT_S) for f in [*good, more]] == [*map(str, range(20)), "last"]
    with pytest.raises(ValueError, match="boom"):
        bad.result(TIMEOUT_S)
    assert stored(db) == [*map(str, range(20)), "last"]


def test_a_unit_that_fails_by_itself_leaves_nothing(db, run_id):
    with pytest.raises(ValueError, match="boom"):
        db.submit(explode, run_id).result(TIMEOUT_S)
    assert db.submit(insert, run_id, "next").result(TIMEOUT_S) == "next"
    assert stored(db) == ["next"]


def test_units_that_wait_share_a_commit(db, run_id):
    commits: list[object] = []
    with held(db):
        event.listen(db.engine, "commit", commits.append)
        futures = [db.submit(insert, run_id, str(i)) for i in range(50)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert len(commits) == 2  # the one that was waited for, and this


def test_units_of_one_kind_run_as_one_bulk_call(db, run_id, bulk):
    with held(db):
        futures = [db.submit(bulk, run_id, str(i)) for i in range(30)]
        other = db.submit(insert, run_id, "other")
    assert [f.result(TIMEOUT_S) for f in futures] == [*map(str, range(30))]
    assert other.result(TIMEOUT_S) == "other"
    assert bulk.sizes == [30]
    assert stored(db) == [*map(str, range(30)), "other"]


def test_a_bad_item_of_a_bulk_call_fails_alone(db, run_id, bulk):
    with held(db):
        futures = {kind: db.submit(bulk, run_id, kind) for kind in ("a", "bad", "b")}
    assert (futures["a"].result(TIMEOUT_S), futures["b"].result(TIMEOUT_S)) == ("a", "b")
    with pytest.raises(ValueError, match="bad"):
        futures["bad"].result(TIMEOUT_S)
    assert bulk.sizes == [3]
    assert stored(db) == ["a", "b"]


def test_a_bulk_call_that_fails_is_rolled_back_and_its_units_run_one_by_one(db, run_id, bulk):
    with held(db):
        futures = {kind: db.submit(bulk, run_id, kind) for kind in ("a", "worse", "b")}
        other = db.submit(insert, run_id, "other")
    assert [f.result(TIMEOUT_S) for f in (futures["a"], futures["b"], other)] == ["a", "b", "other"]
    with pytest.raises(ValueError, match="worse"):
        futures["worse"].result(TIMEOUT_S)
    assert bulk.sizes == [3]
    assert stored(db) == ["a", "b", "other"]


def test_a_bulk_call_with_too_few_results_acknowledges_nothing_of_itself(db, run_id):
    def unit(conn, kind):
        return insert(conn, run_id, kind)

    def many(conn, items):
        insert(conn, run_id, "of the call that failed")
        return ["only one"]

    bulk = BulkUnit(unit, many)
    with held(db):
        futures = [db.submit(bulk, kind) for kind in "abc"]
    assert [f.result(TIMEOUT_S) for f in futures] == ["a", "b", "c"]
    assert stored(db) == ["a", "b", "c"]


def test_a_unit_submitted_with_keywords_runs_apart(db, run_id, bulk):
    with held(db):
        futures = [db.submit(bulk, run_id, "a"), db.submit(bulk, run_id, kind="b"), db.submit(bulk, run_id, "c")]
    assert [f.result(TIMEOUT_S) for f in futures] == ["a", "b", "c"]
    assert bulk.sizes == [2]


def test_a_cancelled_unit_is_not_run_and_the_writer_continues(db, run_id):
    with held(db):
        unwanted = db.submit(insert, run_id, "unwanted")
        assert unwanted.cancel()
        wanted = db.submit(insert, run_id, "wanted")
    assert wanted.result(TIMEOUT_S) == "wanted"
    with pytest.raises(CancelledError):
        unwanted.result(TIMEOUT_S)
    assert stored(db) == ["wanted"]


def test_a_statement_that_fails_is_a_store_error_of_its_unit(db, run_id):
    def broken(conn):
        conn.execute(text("SELECT * FROM nowhere"))

    with held(db):
        together, good = db.submit(broken), db.submit(insert, run_id, "good")
    alone = db.submit(broken)
    for future in (together, alone):
        with pytest.raises(StoreError, match="nowhere") as raised:
            future.result(TIMEOUT_S)
        assert "\n" not in str(raised.value)
    assert good.result(TIMEOUT_S) == "good"


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


def test_close_commits_submitted_units(db, run_id):
    with held(db):
        futures = [db.submit(insert, run_id, str(i)) for i in range(600)]  # more than one batch
    db.close()
    assert all(future.done() for future in futures)
    assert len(stored(db)) == 600


@pytest.mark.parametrize("used", [False, True])
async def test_a_closed_database_takes_no_more_units(db, run_id, used):
    if used:
        await db.asubmit(insert, run_id, "before")
    db.close()
    db.close()
    for submit in (db.submit, db.asubmit):
        with pytest.raises(StoreError, match="was closed by this process"):
            submit(insert, run_id, "after")
    assert len(stored(db)) == used


@pytest.mark.parametrize("url", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_bad_urls_are_refused(url):
    with pytest.raises(UserError):
        Database(url)


@pytest.mark.parametrize("url", ["mysql://me:secret@x/y", "me:secret@x/y", "postgresql://me:the@secret:secret@x/y"])
def test_an_error_about_a_url_keeps_its_password(url):
    with pytest.raises(UserError) as caught:
        Database(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_an_old_schema_names_the_command(empty_database_url):
    db = Database(empty_database_url)
    with pytest.raises(StoreError, match="agentrl db upgrade"):
        db.require_current()
    db.upgrade()
    db.require_current()
    db.downgrade("-1")
    with pytest.raises(StoreError, match="agentrl db upgrade"):
        db.require_current()
    db.close()


def test_the_migrations_are_read_once_per_process(db):
    revisions.newest_revision.cache_clear()
    for _ in range(3):
        db.require_current()
    assert revisions.newest_revision.cache_info().misses == 1


def test_a_postgresql_database_that_does_not_exist_is_not_waited_for(databases):
    with databases.lent("postgresql") as url:
        missing = Database(make_url(url).set(database="missing").render_as_string(hide_password=False))
        with pytest.raises(StoreError, match="does not exist"):
            missing.query(lambda conn: None)


def test_connections_to_postgresql_are_named_and_do_not_idle_in_a_transaction(databases):
    with databases.lent("postgresql") as url:
        for query, name in (({}, "agentrl"), ({"application_name": "mine"}, "mine")):
            db = Database(make_url(url).update_query_dict(query).render_as_string(hide_password=False))
            show = "SELECT current_setting('application_name'), current_setting('idle_in_transaction_session_timeout')"
            assert db.query(lambda conn, show=show: tuple(conn.execute(text(show)).one())) == (name, "1min")
            db.close()


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


def test_an_event_with_a_name_is_stored_once(db, run_id):
    for _ in range(2):
        db.transact(events.record, run_id, "train_step", {"step": 1}, "trainer", "0" * 32)
    db.transact(events.record, run_id, "train_step", {"step": 2}, "trainer")
    assert [row.data["step"] for row in db.query(events.of_run, run_id, "train_step")] == [1, 2]


def test_a_read_sees_one_snapshot(db, run_id):
    with db.read() as conn:
        before = conn.execute(select(events.events.c.kind)).all()
        db.transact(insert, run_id, "meanwhile")
        assert conn.execute(select(events.events.c.kind)).all() == before
    assert stored(db) == ["meanwhile"]
