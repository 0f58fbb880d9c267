"""The tasks of several runs: the same data, wherever it stands; means of sessions; the largest difference first."""

from __future__ import annotations

from statistics import fmean

import pytest
from history import History
from sqlalchemy import select, update

from agentrl.store import Database
from agentrl.store.tables import groups, sessions, tasks, trajectories
from agentrl.store.views import shared_tasks


def two(db: Database) -> tuple[History, History]:
    made = History(db, name="first", seed=1), History(db, name="second", seed=2)
    for history in made:
        history.train(3)
    return made


def returns(history: History) -> dict[str, list[float]]:
    """Data of a task → the return of each of its sessions."""
    t = trajectories.c
    rows = history.db.query(
        lambda conn: conn.execute(
            select(tasks.c.data, sessions.c.id, t["return"])
            .join(groups, groups.c.task_id == tasks.c.id)
            .join(sessions, sessions.c.group_id == groups.c.id)
            .join(trajectories, t.session_id == sessions.c.id)
            .where(tasks.c.run_id == history.run_id)
        ).all()
    )
    per_session = {(str(data["n"]), session_id): value for data, session_id, value in rows}
    found: dict[str, list[float]] = {}
    for (n, _), value in per_session.items():
        found.setdefault(n, []).append(value)
    return found


def test_means_are_of_sessions_and_the_largest_difference_is_first(db: Database) -> None:
    runs = two(db)
    n, rows = db.query(shared_tasks.of_runs, [run.run_id for run in runs])
    expected = [returns(run) for run in runs]
    assert n == len(rows) == len(set(expected[0]) & set(expected[1])) > 1
    for row in rows:
        number = row["data"].strip('{}"n: ')
        assert row["means"] == [fmean(of_run[number]) for of_run in expected]
        assert row["sessions"] == [len(of_run[number]) for of_run in expected]
    differences = [row["difference"] for row in rows]
    assert differences == sorted(differences, reverse=True)
    assert db.query(shared_tasks.of_runs, [run.run_id for run in runs], 1) == (n, rows[:1])


@pytest.mark.long_on("postgresql")
def test_a_task_at_another_position_is_the_same_task(db: Database) -> None:
    runs = two(db)
    before = db.query(shared_tasks.of_runs, [run.run_id for run in runs])
    with db.write() as conn:
        of_second = tasks.c.run_id == runs[1].run_id
        conn.execute(update(tasks).where(of_second).values(position=tasks.c.position + 100))
    assert db.query(shared_tasks.of_runs, [run.run_id for run in runs]) == before


@pytest.mark.long_on("postgresql")
def test_other_data_is_another_task(db: Database) -> None:
    runs = two(db)
    with db.write() as conn:
        conn.execute(update(tasks).where(tasks.c.run_id == runs[1].run_id).values(data={"n": "else"}))
    assert db.query(shared_tasks.of_runs, [run.run_id for run in runs]) == (0, [])


@pytest.mark.long_on("postgresql")
def test_very_long_tasks_are_not_compared(db: Database) -> None:
    runs = two(db)
    with db.write() as conn:
        conn.execute(update(tasks).values(data={"text": "x" * (shared_tasks.LONGEST + 1)}))
    assert db.query(shared_tasks.of_runs, [run.run_id for run in runs]) == (0, [])


@pytest.mark.long_on("postgresql")
def test_a_run_without_groups_shares_none(db: Database) -> None:
    runs = *two(db), History(db, name="third")
    assert db.query(shared_tasks.of_runs, [run.run_id for run in runs]) == (0, [])
