"""Tasks are stored exactly once, batch by batch, and every cursor gets the same task however they arrived."""

from __future__ import annotations

import json

import pytest
from run_records import create_run

from agentrl.errors import RequestError
from agentrl.store import Database, runs, task_rows
from agentrl.store.audit import run_audit
from agentrl.store.task_rows import NewSource


def run_with(db: Database, *sources: NewSource, name: str = "test") -> str:
    with db.write() as conn:
        return runs.create(conn, name=name, config={}, sources=sources, base_model="tiny", key=name, seed=3, steps=10)


def add(db: Database, run_id: str, source: int, numbers: range, *, before: int, complete: bool = False) -> bool:
    texts = [json.dumps({"source": source, "n": n}) for n in numbers]
    return db.transact(
        task_rows.add, run_id, source, texts, read_before=before, read=before + len(numbers), complete=complete
    )


def visited(db: Database, run_id: str, cursors: range) -> list[tuple[int, int]]:
    with db.read() as conn:
        found = [task_rows.task_at(conn, run_id, cursor, 3).data for cursor in cursors]
    return [(task["source"], task["n"]) for task in found]


def test_a_batch_is_stored_once(db: Database) -> None:
    run_id = run_with(db, NewSource(name="a"))
    assert add(db, run_id, 0, range(3), before=0)
    assert not add(db, run_id, 0, range(3), before=0)  # a repeated transaction, or a second process
    assert not add(db, run_id, 0, range(4, 5), before=4)
    assert add(db, run_id, 0, range(3, 5), before=3, complete=True)
    assert not add(db, run_id, 0, range(5, 6), before=5)
    (source,) = db.query(task_rows.sources, run_id)
    assert (source.stored, source.rows_read, source.complete) == (5, 5, True)
    assert sorted(n for _, n in visited(db, run_id, range(5))) == list(range(5))


def test_the_order_does_not_depend_on_when_tasks_arrive(db: Database) -> None:
    whole, bits = (
        run_with(db, NewSource(name="a", weight=2, block=4), NewSource(name="b", block=4), name=name)
        for name in ("whole", "bits")
    )
    for source, size in ((0, 10), (1, 9)):
        add(db, whole, source, range(size), before=0, complete=True)
    want = visited(db, whole, range(60))
    got: list[tuple[int, int]] = []
    with pytest.raises(RequestError) as refused:
        visited(db, bits, range(1))
    assert (refused.value.status, refused.value.code) == (429, task_rows.NOT_STORED)
    for start in range(0, 10, 2):
        add(db, bits, 0, range(start, start + 2), before=start, complete=start == 8)
        add(db, bits, 1, range(start, min(start + 2, 9)), before=start, complete=start == 8)
        while True:
            try:
                got += visited(db, bits, range(len(got), len(got) + 1))
            except RequestError:
                break
            if len(got) == 60:
                break
    assert got == want
    assert {source for source, _ in want} == {0, 1}
    of_first = [n for source, n in want if source == 0]
    assert [sorted(of_first[i : i + 10]) for i in (0, 10, 20, 30)] == [list(range(10))] * 4


def test_a_changed_source_is_stored_anew_until_groups_have_started(db: Database) -> None:
    run_id = run_with(db, NewSource(name="a", content={"v": 1}), NewSource(name="b"))
    add(db, run_id, 0, range(3), before=0)
    add(db, run_id, 1, range(2), before=0, complete=True)
    assert db.transact(task_rows.start_again, run_id, 0, {"v": 2})
    first, second = db.query(task_rows.sources, run_id)
    assert (first.stored, first.rows_read, first.content, second.stored) == (0, 0, {"v": 2}, 2)
    add(db, run_id, 0, range(5, 9), before=0, complete=True)
    assert {task for task in visited(db, run_id, range(8)) if task[0] == 0} == {(0, n) for n in range(5, 9)}
    with db.write() as conn:
        conn.exec_driver_sql(f"UPDATE runs SET data_cursor = 1 WHERE id = '{run_id}'")
    assert not db.transact(task_rows.start_again, run_id, 0, {"v": 3})


def test_a_run_without_tasks_says_so(db: Database) -> None:
    run_id = run_with(db)
    with pytest.raises(RequestError, match="this run has no tasks"):
        visited(db, run_id, range(1))


def test_a_run_from_before_sources_keeps_its_order(db: Database) -> None:
    """The order of the release before, as its code computed it."""
    with db.write() as conn:
        run_id = create_run(conn, task_data=[{"source": 0, "n": n} for n in range(5)])
        conn.exec_driver_sql("UPDATE task_sources SET block = 0")
    assert [n for _, n in visited(db, run_id, range(10))] == [1, 0, 2, 3, 4, 1, 2, 0, 3, 4]


def test_an_audit_finds_a_task_that_is_missing(db: Database) -> None:
    run_id = run_with(db, NewSource(name="a"), NewSource(name="b"))
    for source in (0, 1):
        add(db, run_id, source, range(3), before=0, complete=True)
    assert audited(db, run_id) == []
    with db.write() as conn:
        conn.exec_driver_sql("DELETE FROM tasks WHERE position = 3")
    assert audited(db, run_id) == [f"task_sources {run_id} b: 3 tasks are recorded, 2 are stored"]


def audited(db: Database, run_id: str) -> list[str]:
    with db.read() as conn:
        return list(run_audit.scan(conn, run_id))
