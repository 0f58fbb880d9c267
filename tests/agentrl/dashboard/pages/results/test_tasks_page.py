"""The tasks of a run: success over time, and which ones to look at first."""

from __future__ import annotations

import pytest
from history import CONFIG, LIMITS, History
from page_visits import HOSTILE, links, page, tables, text, visit
from sqlalchemy import insert, select, update

from agentrl.dashboard.page_rendering import number, percent
from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import groups, runs, sessions, task_sources, tasks, trajectories
from agentrl.store.views.results import task_overview


def set_returns(history: History, *by_group: list[float]) -> list[str]:
    """Give the groups of the run, oldest first, these returns of their episodes; returns the groups' tasks."""
    found = []
    with history.db.write() as conn:
        own = groups.c.run_id == history.run_id
        rows = conn.execute(select(groups.c.id, groups.c.task_id).where(own).order_by(groups.c.cursor)).all()
        for row, values in zip(rows, by_group, strict=False):
            ids = conn.execute(
                select(sessions.c.id).where(sessions.c.group_id == row.id).order_by(sessions.c.sample_index)
            ).scalars()
            for session_id, value in zip(ids, values, strict=False):
                path = trajectories.c.session_id == session_id
                conn.execute(update(trajectories).where(path).values({"return": value}))
            found.append(row.task_id)
    return found


@pytest.fixture
def history(db: Database) -> History:
    """Four groups: one is solved by half, one never, one always, and one has no return yet."""
    History(db, name="other", seed=9).train(1)
    made = History(db, seed=1)
    for _ in range(3):
        made.group()
    with db.write() as conn:
        group_starts.start_group(conn, made.run_id, LIMITS, [codec.new_id() for _ in range(2)])
    return made


def test_the_hardest_tasks_come_first(history: History, db: Database) -> None:
    half, never, always = set_returns(history, [1.0, 0.0], [0.0, 0.25], [1.0, 1.5])
    with db.read() as conn:
        data = {row.id: row.data for row in conn.execute(select(tasks))}
    rows = tables(page(db, "/runs/test/tasks"))["Tasks"]
    assert [row[2:7] for row in rows] == [
        [percent(0.0), number(0.125), number(0.25), "2", "1"],
        [percent(0.5), number(0.5), "1", "2", "1"],
        [percent(1.0), number(1.25), number(1.5), "2", "1"],
    ]
    assert [row[0] for row in rows] == [f'{{"n": {data[task]["n"]}}}' for task in (never, half, always)]
    only = tables(page(db, "/runs/test/tasks?order=never+solved"))["Tasks"]
    assert [row[2] for row in only] == [percent(0.0)]
    assert [row[7] for row in tables(page(db, "/runs/test/tasks?order=newest"))["Tasks"]] == ["2", "1", "0"]
    assert tables(page(db, "/runs/test/tasks?order=easiest"))["Tasks"][0][2] == percent(1.0)


def test_a_success_is_what_the_curriculum_says(history: History, db: Database) -> None:
    set_returns(history, [1.0, 0.0], [0.0, 0.25], [1.0, 1.5])
    with db.write() as conn:
        rollout = {**CONFIG["rollout"], "curriculum": {"success": 0.25}}
        conn.execute(update(runs).where(runs.c.id == history.run_id).values(config={**CONFIG, "rollout": rollout}))
    html = page(db, "/runs/test/tasks")
    assert "a return of at least 0.2500" in text(html)
    assert sorted(row[2] for row in tables(html)["Tasks"]) == sorted(map(percent, (0.5, 0.5, 1.0)))


def test_tasks_can_be_filtered_by_source(history: History, db: Database) -> None:
    a, b, c = set_returns(history, [1.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    with db.write() as conn:
        for task_id, data in ((a, {"source": "sums"}), (b, {"data_source": "sums"}), (c, {"source": HOSTILE})):
            conn.execute(update(tasks).where(tasks.c.id == task_id).values(data=data))
    html = page(db, "/runs/test/tasks")
    (wanted,) = {href for href in links(html) if href.endswith("source=sums")}
    assert "sums 2" in text(html)
    assert [row[1] for row in tables(page(db, wanted.removeprefix("/ui")))["Tasks"]] == ["sums", "sums"]
    assert "Tasks" not in tables(page(db, "/runs/test/tasks?source=none"))


def test_the_sources_of_a_run_are_known_by_the_places_of_its_tasks(history: History, db: Database) -> None:
    set_returns(history, [1.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    with db.write() as conn:
        one = {"run_id": history.run_id, "source": 1, "name": "second", "weight": 1.0, "block": 1}
        conn.execute(insert(task_sources).values(**one, stored=0, rows_read=0, complete=True))
        positions = {row.id: row.position for row in conn.execute(select(tasks))}
    found = db.query(task_overview.newest, history.run_id, 10, 1.0)
    assert [one.source for one in found] == [("tasks", "second")[positions[one.task_id] % 2] for one in found]


def test_an_episode_with_sub_agents_counts_once(db: Database) -> None:
    history = History(db, seed=1)
    with db.write() as conn:
        new = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id() for _ in range(2)])
        child = child_sessions.start_child(conn, new.session_ids[0], LIMITS, "k", {})
        for session_id in (*child.session_ids, *new.session_ids):
            history.play(conn, session_id, reward=session_id in new.session_ids)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)
    (found,) = db.query(task_overview.newest, history.run_id, 10, 1.0)
    assert found.episodes == 2


def test_only_the_newest_groups_are_read(history: History, db: Database) -> None:
    set_returns(history, [1.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    found = db.query(task_overview.newest, history.run_id, 2, 1.0)
    assert [one.cursor for one in found] == [2]  # the newest group has no return yet


def test_a_run_without_returns_says_when_its_tasks_appear(db: Database) -> None:
    History(db)
    html = page(db, "/runs/test/tasks")
    assert "has a return yet" in text(html)


@pytest.mark.parametrize("query", ["order=x", "window=7", "skip=-1", "source=" + 201 * "x"])
def test_a_bad_parameter_is_refused_by_name(db: Database, query: str) -> None:
    History(db)
    found = visit(db, f"/runs/test/tasks?{query}")
    assert found.status_code == 400
    assert query.split("=")[0] in found.text
