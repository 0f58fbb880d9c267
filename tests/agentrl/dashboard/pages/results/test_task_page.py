"""The page of a task: its data, its groups over time, and two of them side by side."""

from __future__ import annotations

import pytest
from history import History
from page_visits import HOSTILE, links, page, tables, text, visit
from sqlalchemy import select, update

from agentrl.dashboard.page_rendering import number
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import groups, interaction_data, sessions, tasks
from agentrl.store.views.results import task_groups

GROUPS = "Groups of the task"


@pytest.fixture
def history(db: Database) -> History:
    """Eight groups over five tasks: the run begins its second pass."""
    made = History(db, seed=1)
    made.train(4)
    return made


def often(history: History) -> tuple[str, list[str]]:
    """A task with two groups, the newest first."""
    with history.db.read() as conn:
        rows = conn.execute(select(groups.c.task_id, groups.c.id).order_by(groups.c.cursor.desc())).all()
    found: dict[str, list[str]] = {}
    for task_id, group_id in rows:
        found.setdefault(task_id, []).append(group_id)
    return next((task_id, ids) for task_id, ids in found.items() if len(ids) == 2)


def test_the_groups_of_a_task_are_listed_with_their_steps_and_returns(history: History, db: Database) -> None:
    task_id, ids = often(history)
    html = page(db, f"/runs/test/tasks/{task_id}")
    rows = tables(html)[GROUPS]
    assert [row[2] for row in rows] == [group_id[-8:] for group_id in ids]
    for row, group_id in zip(rows, ids, strict=True):
        (step,) = {
            step for step, batch in history.batches.items() for t in batch.trajectories if t.group_id == group_id
        }
        assert row[4] == str(step)
        values = {t.episode_id: t.episode_return for t in history.batches[step].trajectories if t.group_id == group_id}
        assert sorted(row[6].split()) == sorted(map(number, values.values()))
        assert f"/ui/runs/test/steps/{step}" in links(html)


@pytest.mark.long_on("postgresql")
def test_two_groups_are_shown_side_by_side_with_their_last_answers(history: History, db: Database) -> None:
    task_id, (new, old) = often(history)
    html = page(db, f"/runs/test/tasks/{task_id}?left={old}&right={new}")
    left, right = (part.split("</section>")[0] for part in html.split('<section aria-labelledby="side-')[1:])
    with db.read() as conn:
        for side, group_id in ((left, old), (right, new)):
            in_order = select(sessions.c.id).where(sessions.c.group_id == group_id).order_by(sessions.c.sample_index)
            of_group = conn.execute(in_order).scalars().all()
            assert [f"/ui/sessions/{one}" for one in of_group] == [href for href in links(side) if "sessions" in href]
            assert side.count("<pre ") == 2


@pytest.mark.long_on("postgresql")
def test_pages_of_groups_have_each_group_once(history: History, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_groups, "PAGE", 1)
    task_id, ids = often(history)
    first = page(db, f"/runs/test/tasks/{task_id}")
    (older,) = (href for href in links(first) if "before=" in href)
    second = page(db, older.removeprefix("/ui"))
    assert [tables(html)[GROUPS][0][2] for html in (first, second)] == [group_id[-8:] for group_id in ids]


def test_a_task_that_was_not_drawn_yet(db: Database) -> None:
    history = History(db)
    with db.read() as conn:
        task_id = conn.execute(select(tasks.c.id).where(tasks.c.run_id == history.run_id).limit(1)).scalar_one()
    assert "No group of this task has begun" in text(page(db, f"/runs/test/tasks/{task_id}"))


def test_what_others_wrote_is_text(history: History, db: Database) -> None:
    task_id, (new, old) = often(history)
    call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    answer = {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}
    with db.write() as conn:
        conn.execute(update(tasks).values(data={HOSTILE: [HOSTILE]}))
        conn.execute(update(sessions).values(error=HOSTILE, answer=HOSTILE))
        conn.execute(update(groups).values(reject_reason=HOSTILE[:100]))
        conn.execute(update(interaction_data).values(answer=codec.pack_json(answer)))
    html = page(db, f"/runs/test/tasks/{task_id}?left={old}&right={new}")
    assert html.count("{{ 7777 * 7777 }}") > 8


@pytest.mark.long_on("postgresql")
def test_an_unknown_task_or_one_of_another_run_is_not_found(history: History, db: Database) -> None:
    other = History(db, name="other")
    with db.read() as conn:
        theirs = conn.execute(select(tasks.c.id).where(tasks.c.run_id == other.run_id).limit(1)).scalar_one()
    for task_id in (theirs, "0" * 32, "x", "%00"):
        assert visit(db, f"/runs/test/tasks/{task_id}").status_code == 404


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("query", ["left=nobody", "right=nobody", "before=x"])
def test_a_bad_parameter_is_refused_by_name(history: History, db: Database, query: str) -> None:
    task_id, _ = often(history)
    found = visit(db, f"/runs/test/tasks/{task_id}?{query}")
    assert found.status_code == 400
    assert query.split("=")[0] in found.text
