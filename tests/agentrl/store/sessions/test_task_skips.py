"""Tasks that are always or never solved are drawn less often; the order follows from the recorded rewards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from concurrent_writes import meanwhile
from play import call, group, open_group
from run_records import create_run
from sqlalchemy import select, text

from agentrl.domain import task_order
from agentrl.domain.curriculum import Curriculum
from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, activity, runs, task_rows
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import group_starts, task_skips, task_success
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, skipped_tasks, tasks
from agentrl.store.task_rows import NewSource
from agentrl.store.training import rewards

CURRICULUM = Curriculum(low=0.25, high=0.75, skip=0.6, success=1.0, groups=2)
TASKS, PASSES = 8, 6
HERE = Path(__file__)


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return replace(limits, max_staleness=10**6, max_concurrent_groups=10**6, curriculum=CURRICULUM)


def worth(n: int) -> tuple[float, float]:
    """Of four tasks, one is always solved, one never, and two sometimes."""
    return ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0))[n % 4]


def new_run(db: Database, name: str = "test") -> str:
    with db.write() as conn:
        return create_run(conn, name=name, task_data=[{"n": n} for n in range(TASKS)], steps=10**6)


def upcoming(conn, run_id: str, limits: Limits) -> int:
    """Start a group; returns its task."""
    return int((group_starts.start_group(conn, run_id, limits, [new_id()]).task or {})["n"])


def play(db: Database, run_id: str, limits: Limits, until: int) -> None:
    """Groups, each in one transaction, until the data cursor is there."""
    while db.query(runs.get, run_id).data_cursor < until:
        play_next(db, run_id, limits)


def play_next(db: Database, run_id: str, limits: Limits) -> None:
    """A whole group in one transaction; its rewards are what its task is worth."""
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [new_id(), new_id()])
        for session_id, value in zip(new.session_ids, worth((new.task or {})["n"]), strict=True):
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=value, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)


def drawn(db: Database, run_id: str) -> list[tuple[int, int]]:
    """(cursor, task) of all groups."""
    of_run = select(groups.c.cursor, tasks.c.data).join(tasks, tasks.c.id == groups.c.task_id)
    with db.read() as conn:
        rows = conn.execute(of_run.where(groups.c.run_id == run_id).order_by(groups.c.cursor))
        return [(cursor, data["n"]) for cursor, data in rows]


def skipped(db: Database, run_id: str) -> list[tuple[int, int, float]]:
    """(cursor, task, success rate) of all skips."""
    rows = select(skipped_tasks, tasks.c.data).join(tasks, tasks.c.id == skipped_tasks.c.task_id)
    with db.read() as conn:
        found = conn.execute(rows.where(skipped_tasks.c.run_id == run_id).order_by(skipped_tasks.c.cursor))
        return [(row.cursor, row.data["n"], row.success_rate) for row in found]


def audited(db: Database, run_id: str) -> list[str]:
    with db.read() as conn:
        return list(run_audit.scan(conn, run_id))


def by_hand(cursors: int) -> tuple[list[tuple[int, int]], list[tuple[int, int, float | None]]]:
    """The order by the pure functions alone; each task's success rate is known from the second pass on."""
    turns, skips = [], []
    for cursor in range(cursors):
        position = task_order.position(cursor, stored=TASKS, complete=True, block=task_order.BLOCK, key="0/0")
        assert position is not None
        rate = CURRICULUM.rate(worth(position))
        if CURRICULUM.may_skip(0, position, cursor // TASKS) and CURRICULUM.is_outside(rate):
            skips.append((cursor, position, rate))
        else:
            turns.append((cursor, position))
    return turns, skips


@pytest.mark.long_on("postgresql")
def test_the_order_follows_from_the_seed_and_the_recorded_rewards(db, limits):
    run_id = new_run(db)
    play(db, run_id, limits, PASSES * TASKS)
    end = db.query(runs.get, run_id).data_cursor
    turns, skips = by_hand(end)
    assert (drawn(db, run_id), skipped(db, run_id)) == (turns, skips)
    visits = [sum(n == task for _, n in turns) for task in range(TASKS)]
    assert all(visits[n] >= PASSES for n in range(TASKS) if n % 4 > 1)
    assert all(0 < visits[n] < PASSES for n in range(TASKS) if n % 4 < 2)
    with db.read() as conn:
        figures = activity.facts(conn, run_id)["run"]
    assert (figures["skipped_tasks"], figures["admitted_groups"]) == (len(skips), end - len(skips))
    assert audited(db, run_id) == []


KILLED = """
import sys
sys.path[:0] = sys.argv[4:]
from test_task_skips import Curriculum, Limits, play
from agentrl.store import Database, runs
db, run_id, cursor = Database(sys.argv[1]), sys.argv[2], 0
while True:
    play(db, run_id, eval(sys.argv[3]), cursor)
    cursor = db.query(runs.get, run_id).data_cursor + 1
    print(cursor, flush=True)
"""


@pytest.mark.long_on("postgresql")
def test_after_kill_9_the_order_is_that_without_a_kill(db, database_url, limits):
    end = 5 * TASKS
    whole, killed = new_run(db, "whole"), new_run(db, "killed")
    play(db, whole, limits, end)
    folders = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[3])]
    for lines in (14, 5):
        line = [sys.executable, "-c", KILLED, database_url, killed, repr(limits), *folders]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        for _ in range(lines):
            assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)  # in the middle of the next group's start
        process.communicate()
    assert skipped(db, killed)
    play(db, killed, limits, end)
    assert (drawn(db, killed), skipped(db, killed)) == (drawn(db, whole), skipped(db, whole))
    assert audited(db, killed) == []


def test_two_that_start_at_once_get_the_next_two_tasks(db, limits):
    run_id = new_run(db)
    play(db, run_id, limits, 2 * TASKS)
    before = len(drawn(db, run_id))

    def start(conn):
        return upcoming(conn, run_id, limits)

    first, second = meanwhile(db, start, start)
    end = db.query(runs.get, run_id).data_cursor
    assert drawn(db, run_id)[before:] == by_hand(end)[0][before:]
    assert sorted((first, second)) == sorted(n for _, n in drawn(db, run_id)[before:])


def test_a_task_whose_groups_have_not_ended_is_not_skipped(db, limits):
    run_id = new_run(db)
    for _ in range(2 * TASKS):
        open_group(db, run_id, limits)
    assert skipped(db, run_id) == []


@pytest.mark.long_on("postgresql")
def test_only_the_last_groups_count(db, limits):
    run_id = new_run(db)
    of_task = []
    with db.read() as conn:
        task_id = conn.execute(select(tasks.c.id).where(tasks.c.run_id == run_id, tasks.c.position == 3)).scalar_one()
    for values in ((0.0, 0.0), (1.0, 1.0), (1.0, 1.0)):
        for _ in range(TASKS):
            group(db, run_id, replace(limits, curriculum=None), values=values)
        with db.read() as conn:
            of_task.append(task_success.success_rate(conn, run_id, task_id, CURRICULUM))
    assert of_task == [0.0, 0.5, 1.0]


@pytest.mark.long_on("postgresql")
def test_one_admission_skips_a_bounded_number_of_tasks(db, limits, monkeypatch):
    monkeypatch.setattr(task_skips, "MOST_AT_ONCE", 3)
    run_id = new_run(db)
    always = replace(limits, curriculum=replace(CURRICULUM, skip=1.0))
    for _ in range(TASKS):
        group(db, run_id, always, values=(1.0, 1.0))
    cursors = []
    for _ in range(3):
        group(db, run_id, always, values=(1.0, 1.0))
        cursors.append(drawn(db, run_id)[-1][0])
    assert cursors == [TASKS + 3, TASKS + 7, TASKS + 11]
    assert audited(db, run_id) == []


@pytest.mark.long_on("postgresql")
def test_a_refused_start_skips_nothing(db, limits):
    with db.write() as conn:
        sources = [NewSource(name="a"), NewSource(name="b", block=4)]
        run_id = runs.create(
            conn, name="mixed", config={}, sources=sources, base_model="t", key="k", seed=0, steps=10**6
        )
        task_rows.add(conn, run_id, 0, ['{"n": 0}'], read_before=0, read=1, complete=True)
        task_rows.add(conn, run_id, 1, ['{"n": 2}'] * 4, read_before=0, read=4, complete=False)
    always = replace(limits, curriculum=replace(CURRICULUM, skip=1.0))
    refused = None
    while refused is None:
        before = db.query(runs.get, run_id).data_cursor, skipped(db, run_id)
        try:
            play_next(db, run_id, always)
        except RequestError as error:
            refused = error
    assert refused.code == task_rows.NOT_STORED
    assert (db.query(runs.get, run_id).data_cursor, skipped(db, run_id)) == before
    db.transact(task_rows.add, run_id, 1, ['{"n": 2}'] * 4, read_before=4, read=8, complete=True)
    group(db, run_id, always)
    assert drawn(db, run_id)[-1][1] == 2
    assert skipped(db, run_id)
    assert audited(db, run_id) == []


@pytest.mark.long_on("postgresql")
def test_the_audit_finds_wrong_skips(db, limits):
    run_id = new_run(db)
    play(db, run_id, limits, 3 * TASKS)
    (cursor, *_), *_ = skipped(db, run_id)
    taken = drawn(db, run_id)[0][0]
    with db.write() as conn:
        conn.execute(text("UPDATE skipped_tasks SET cursor = :new WHERE cursor = :old"), {"new": taken, "old": cursor})
    found = "\n".join(audited(db, run_id))
    assert "has its cursor" in found
    assert "it is in the first pass" in found
    with db.write() as conn:
        conn.execute(text("UPDATE skipped_tasks SET cursor = 999 WHERE cursor = :old"), {"old": taken})
        conn.execute(text("UPDATE runs SET data_cursor = admitted"))
    found = "\n".join(audited(db, run_id))
    assert "its cursor was never given out" in found
    assert "tasks skipped" in found
