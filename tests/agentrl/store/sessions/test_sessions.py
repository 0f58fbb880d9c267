"""Sessions and groups: sub-agents, repeated starts, and concurrent ends on several connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
from play import begin_call, call, end, open_group
from sqlalchemy import select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.calls import running_calls
from agentrl.store.sessions import (
    child_sessions,
    due_times,
    group_admission,
    group_starts,
    session_limits,
    session_lookup,
)
from agentrl.store.sessions.ends import liveness, sealing, settling
from agentrl.store.tables import groups, trajectories
from agentrl.store.tables import runs as runs_table
from agentrl.store.training import rewards

LET_IT_WAIT_S = 0.2  # for a thread to reach a lock that the test holds


def meanwhile(db: Database, first: Callable[..., Any], second: Callable[..., Any]) -> tuple[Any, Any]:
    """`first(conn)` and, on another connection before the first commits, `second(conn)`; what each returned."""
    with ThreadPoolExecutor(1) as pool:
        with db.write() as conn:
            one = first(conn)
            other: Future[Any] = pool.submit(db.transact, second)
            sleep(LET_IT_WAIT_S)
        return one, other.result()


def counters(db: Database, run_id: str) -> tuple[int, int, int]:
    with db.read() as conn:
        run = runs.get(conn, run_id)
    return run.admitted, run.running, run.returned


def state(db: Database, group_id: str) -> str:
    with db.read() as conn:
        return str(conn.execute(select(groups.c.state).where(groups.c.id == group_id)).scalar_one())


def child_of(db: Database, parent_id: str, limits: session_limits.Limits) -> str:
    with db.write() as conn:
        (child_id,) = child_sessions.start_child(conn, parent_id, limits, f"key of {parent_id}", {}).session_ids
    return child_id


def test_a_repeated_start_gets_the_same_group_and_takes_one_place(db, run_id, limits):
    def start(conn):
        return group_starts.start_group(conn, run_id, limits, ["a", "b"], start_digest="d")

    first, second = meanwhile(db, start, start)
    assert first == second
    assert counters(db, run_id) == (1, 1, 0)


def test_a_repeated_evaluation_gets_the_same_group(db, run_id, limits):
    def start(conn):
        return group_starts.start_evaluation(conn, run_id, limits, ["a"], {"n": 1}, {}, None, start_digest="d")

    first, second = meanwhile(db, start, start)
    assert first == second
    assert counters(db, run_id) == (0, 0, 0)


def test_nothing_of_a_failed_session_s_sub_agents_is_trained(db, run_id, limits):
    """Also two levels below, and when they had ended well and were rewarded before."""
    (root, other) = open_group(db, run_id, limits).session_ids
    child = child_of(db, root, limits)
    grandchild = child_of(db, child, limits)
    with db.write() as conn:
        for session_id in (root, child, grandchild):
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
        sealing.end(conn, grandchild, SessionStatus.COMPLETED, None, limits)
        sealing.end(conn, child, SessionStatus.COMPLETED, None, limits)
        sealing.end(conn, root, SessionStatus.FAILED, "boom", limits)
        sealing.end(conn, other, SessionStatus.FAILED, "boom", limits)
    with db.read() as conn:
        assert runs.state_counts(conn, run_id) == {"groups": {"rejected": 1}, "trajectories": {}}


def test_a_session_that_waits_for_its_reward_can_still_be_given_up(db, run_id, limits):
    patient = replace(limits, reward_timeout_s=1000.0)
    first, second = open_group(db, run_id, limits).session_ids
    with db.write() as conn:
        call(conn, run_id, first)
        assert sealing.end(conn, first, SessionStatus.COMPLETED, None, patient) == "completed"
        assert sealing.end(conn, first, SessionStatus.ABANDONED, None, patient) == "abandoned"
        assert not rewards.add(conn, first, value=1.0, discount=1.0).applied
        assert sealing.end(conn, first, SessionStatus.COMPLETED, None, patient) == "abandoned"
        sealing.end(conn, second, SessionStatus.ABANDONED, None, patient)
    with db.read() as conn:
        assert runs.state_counts(conn, run_id) == {"groups": {"rejected": 1}, "trajectories": {}}


def test_a_reward_of_the_parent_reaches_a_child_that_is_built_meanwhile(db, run_id, limits):
    """The child's builder reads the rewards either before this one (then it is refreshed) or after it."""
    (root, _) = open_group(db, run_id, limits).session_ids
    child = child_of(db, root, limits)
    with db.write() as conn:
        call(conn, run_id, root)
        begin_call(conn, run_id, child, replica="dead")
        call(conn, run_id, child)
        sealing.end(conn, root, SessionStatus.COMPLETED, None, limits)  # built; the child waits for its running call
        running_calls.declare_lost(conn, run_id, "dead")

    def reward(conn):
        return rewards.add(conn, root, value=1.0, discount=1.0)

    meanwhile(db, reward, lambda conn: settling.settle(conn, child, limits))
    with db.read() as conn:
        found = conn.execute(
            select(trajectories.c.state, trajectories.c["return"]).where(trajectories.c.session_id == child)
        ).one()
    assert tuple(found) == ("ready", 1.0)


@pytest.mark.parametrize("round_", range(5))
def test_sessions_of_a_group_that_end_together_settle_it_once_without_a_deadlock(db, run_id, limits, round_):
    """Not repeated by anybody, so a deadlock would be an error here."""
    many = replace(limits, group_size=6)
    new = open_group(db, run_id, many, 6)
    with db.write() as conn:
        for session_id in new.session_ids:
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
    together = threading.Barrier(6)

    def end_one(session_id: str) -> str:
        together.wait()
        return end(db, session_id, many)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(end_one, new.session_ids)) == ["completed"] * 6
    assert state(db, new.group_id) == "ready"
    assert counters(db, run_id) == (1, 0, 0)


def test_two_replicas_settle_the_sessions_of_groups_through_their_group_commits(db, database_url, run_id, limits):
    """Each commits many units at once, whose locks cross: deadlocks are repeated, and nothing happens twice."""
    many = replace(limits, group_size=8, groups_per_step=100)
    started = [open_group(db, run_id, many, 8) for _ in range(6)]
    everybody = [session_id for new in started for session_id in new.session_ids]
    with db.write() as conn:
        for session_id in everybody:
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
    replicas = [Database(database_url), Database(database_url)]
    together = threading.Barrier(8)

    def end_some(i: int) -> list[str]:
        """Every session is ended by both replicas, in different orders."""
        together.wait()
        mine = everybody[i // 2 :: 4][:: 1 if i % 2 else -1]
        ends = [replicas[i % 2].submit(sealing.end, sid, SessionStatus.COMPLETED, None, many) for sid in mine]
        return [one.result() for one in ends]

    with ThreadPoolExecutor(8) as pool:
        assert {status for of_one in pool.map(end_some, range(8)) for status in of_one} == {"completed"}
    for replica in replicas:
        replica.close()
    assert [state(db, new.group_id) for new in started] == ["ready"] * 6
    assert counters(db, run_id) == (6, 0, 0)
    with db.read() as conn:
        assert run_audit.violations(conn, run_id) == []


def test_a_call_begun_during_a_check_keeps_its_session_open(db, run_id, limits):
    """Whoever decides that a session is silent waits for the intents that are about to be committed."""
    session_id = open_group(db, run_id, limits).session_ids[0]
    impatient = replace(limits, session_timeout_s=0.0)

    def look(conn):
        return liveness.check_due_session(conn, session_id, impatient, heard_since=0.0)

    db.transact(due_times.check_at, session_id, 0.0)  # due
    _, abandoned = meanwhile(db, lambda conn: begin_call(conn, run_id, session_id), look)
    assert not abandoned
    with db.read() as conn:
        assert session_lookup.get(conn, session_id).status == SessionStatus.OPEN


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the test is, who was refused still waits."""
    monkeypatch.setattr(group_admission, "WAITS_S", 1e6)


class Turns:
    """Workers and outside programs that ask for the places of a run."""

    def __init__(self, db: Database, run_id: str, limits: session_limits.Limits, places: int) -> None:
        self.db, self.run_id = db, run_id
        self.limits = replace(limits, max_concurrent_groups=places, groups_per_step=100, group_size=1)
        self.had: list[tuple[str, str]] = []  # who plays, and the session

    def ask(self, who: str) -> bool:
        """Whether a place was to be had; who gets none waits."""
        outside = who == "outside"
        try:
            new = self.db.transact(
                group_starts.start_group,
                self.run_id,
                self.limits,
                [f"key {len(self.had)}"],
                owner=None if outside else "worker",
            )
        except RequestError as error:
            if error.code != group_admission.NO_CAPACITY:
                raise
            self.db.transact(group_admission.note_waiting, self.run_id, outside=outside)
            return False
        self.had.append((who, new.session_ids[0]))
        return True

    def free(self, which: int = -1) -> None:
        self.db.transact(sealing.end, self.had[which][1], SessionStatus.ABANDONED, None, self.limits)


@pytest.mark.usefixtures("patient")
def test_workers_and_outside_programs_that_both_wait_get_places_by_turns(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=1)
    assert turns.ask("worker")
    assert not turns.ask("outside")
    for last, first in (("worker", "outside"), ("outside", "worker"), ("worker", "outside")):
        turns.free()
        assert not turns.ask(last), "it had the last place"
        assert turns.ask(first)
    turns.free()
    assert turns.ask("worker")
    turns.free()
    assert turns.ask("worker"), "nobody waits"


@pytest.mark.usefixtures("patient")
def test_workers_and_outside_programs_that_wait_take_places_in_turn(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=3)
    assert [turns.ask("worker") for _ in range(3)] == [True] * 3
    assert not turns.ask("outside")
    turns.free(0)
    turns.free(1)
    assert turns.ask("worker")
    assert not turns.ask("worker")
    assert turns.ask("outside")


@pytest.mark.usefixtures("patient")
def test_a_refused_client_stops_counting_as_waiting(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=1)
    assert turns.ask("worker")
    assert not turns.ask("outside")
    turns.free()
    assert not turns.ask("worker")
    with db.write() as conn:
        conn.execute(
            update(runs_table).values(outside_asked_at=runs_table.c.outside_asked_at - group_admission.WAITS_S)
        )
    assert turns.ask("worker")


def test_a_stopped_run_admits_no_group(db, run_id, limits):
    db.transact(runs.set_status, run_id, "stopping")
    with pytest.raises(RequestError) as caught, db.write() as conn:
        group_admission.admit(conn, run_id, limits, outside=False)
    assert (caught.value.status, caught.value.code) == (409, "run_stopping")
    assert counters(db, run_id) == (0, 0, 0)
