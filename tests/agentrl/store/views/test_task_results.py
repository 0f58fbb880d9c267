"""The results of tasks: kept ones and new ones add up to what all rows say."""

from __future__ import annotations

import time

import pytest
from history import History
from sqlalchemy import select

from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import groups, sessions, trajectories
from agentrl.store.views import task_results
from agentrl.store.views.task_results import Results, TaskResult

SUCCESS = 0.7


def by_hand(db: Database, run_id: str) -> Results:
    with db.read() as conn:
        ended = conn.execute(select(groups).where(groups.c.run_id == run_id, groups.c.state != "running")).all()
        outcomes = {
            row.session_id: (row.group_id, row.outcome)
            for row in conn.execute(
                select(trajectories.c.session_id, trajectories.c.group_id, trajectories.c["return"].label("outcome"))
                .join(sessions, sessions.c.id == trajectories.c.session_id)
                .where(sessions.c.parent_session_id.is_(None))
            )
        }
        leased = select(trajectories.c.group_id, trajectories.c.lease_step_id)
        steps = {group_id: step_id for group_id, step_id in conn.execute(leased) if step_id is not None}
    found: dict[str, TaskResult] = {}
    for group in ended:
        if group.task_id is None:
            continue
        mine = [outcome for group_id, outcome in outcomes.values() if group_id == group.id]
        solved = sum(outcome >= SUCCESS for outcome in mine)
        one = TaskResult(1, len(mine), solved, sum(mine), group.cursor, steps.get(group.id))
        found[group.task_id] = found[group.task_id] + one if group.task_id in found else one
    return found


def same(left: Results, right: Results) -> bool:
    return left.keys() == right.keys() and all(
        (a.groups, a.episodes, a.solved, a.last_cursor, a.last_step_id)
        == (b.groups, b.episodes, b.solved, b.last_cursor, b.last_step_id)
        and a.returns == pytest.approx(b.returns)
        for a, b in ((left[task_id], right[task_id]) for task_id in left)
    )


@pytest.fixture
def history(db: Database, monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setattr(task_results, "CLOCK_SLACK_S", 0.0)
    made = History(db, seed=3)
    made.train(3)
    made.rejected()
    made.evaluation()
    return made


def test_results_follow_from_the_rows(history: History) -> None:
    found, kept = history.db.query(task_results.read, history.run_id, SUCCESS)
    assert same(found, by_hand(history.db, history.run_id))
    assert same(kept.results, found)
    assert sum(result.groups for result in found.values()) == 7
    assert any(result.success_rate not in (None, 0.0) for result in found.values())


def test_later_groups_are_added_to_the_kept_ones(history: History) -> None:
    _, kept = history.db.query(task_results.read, history.run_id, SUCCESS)
    history.group()
    found, after = history.db.query(task_results.read, history.run_id, SUCCESS, kept)
    assert same(found, by_hand(history.db, history.run_id))
    assert sum(result.groups for result in after.results.values()) == 7  # the ready one may change
    history.train()
    found, after = history.db.query(task_results.read, history.run_id, SUCCESS, after)
    assert same(found, by_hand(history.db, history.run_id))
    assert sum(result.groups for result in after.results.values()) == 9


def test_steps_that_are_rolled_back_are_read_anew(history: History) -> None:
    _, kept = history.db.query(task_results.read, history.run_id, SUCCESS)
    history.go_back(1)
    found, after = history.db.query(task_results.read, history.run_id, SUCCESS, kept)
    assert same(found, by_hand(history.db, history.run_id))
    assert sum(result.groups for result in after.results.values()) == 2


def test_groups_of_the_last_minute_are_not_kept(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_results, "CLOCK_SLACK_S", 60.0)
    found, kept = history.db.query(task_results.read, history.run_id, SUCCESS)
    assert kept.results == {}
    assert kept.until <= codec.first_id(time.time() - 59.0)
    assert same(found, by_hand(history.db, history.run_id))
