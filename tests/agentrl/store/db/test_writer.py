"""The group commit: only durable work is acknowledged, and a failing unit fails alone."""

from concurrent.futures import CancelledError

import pytest
from play import held
from sqlalchemy import event, text
from stored_events import TIMEOUT_S, explode, insert, stored

from agentrl.errors import StoreError
from agentrl.store.db.bulk_unit import BulkUnit


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
