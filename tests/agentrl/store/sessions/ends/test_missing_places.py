"""Groups that are never filled: their missing places are given up, and they are trained or rejected."""

from __future__ import annotations

from typing import Any

import pytest
from concurrent_writes import counters, state
from play import Clock, call
from sqlalchemy import select

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, events
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.sessions.ends import missing_places, sealing
from agentrl.store.sessions.named_groups import start_in_group
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, trajectories
from agentrl.store.training import rewards


class Program:
    """An outside program that starts sessions of one group of 4, and the sweep of a proxy, on one clock."""

    def __init__(self, db: Database, run_id: str, limits: Limits, clock: Clock) -> None:
        self.db, self.run_id, self.limits, self.clock = db, run_id, limits, clock
        self.heard_since = clock.now
        self.group_id = ""

    def start(self, key: str | None = None) -> str:
        new = self.db.transact(start_in_group, self.run_id, self.limits, key or new_id(), "g", 4, {"n": 1}, {})
        self.group_id = new.group_id
        return new.session_ids[0]

    def end(self, session_id: str, status: SessionStatus = SessionStatus.COMPLETED) -> None:
        def unit(conn: Any) -> None:
            if status == SessionStatus.COMPLETED:
                call(conn, self.run_id, session_id)
                rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, status, None, self.limits)

        self.db.transact(unit)

    def sweep(self, after_s: float = 0.0) -> list[bool]:
        """What each due group's check did."""
        self.clock.now += after_s
        due = self.db.query(missing_places.due, self.run_id)
        found = [
            self.db.transact(missing_places.check_due_group, one, self.limits, heard_since=self.heard_since)
            for one in due
        ]
        assert self.db.query(lambda conn: list(run_audit.scan(conn, self.run_id))) == []
        return found

    def group(self) -> Any:
        return self.db.query(lambda conn: conn.execute(select(groups).where(groups.c.id == self.group_id)).one())


@pytest.fixture
def program(db: Database, run_id: str, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> Program:
    clock = Clock()
    clock.install(monkeypatch)
    return Program(db, run_id, limits, clock)


def test_a_group_with_enough_episodes_becomes_ready_without_its_missing_sessions(program):
    for _ in range(2):
        program.end(program.start())
    assert program.sweep(program.limits.session_timeout_s - 1) == []
    assert state(program.db, program.group_id) == "running"
    assert program.sweep(1) == [True]
    group = program.group()
    assert (group.state, group.size, group.missing, group.due_at, group.reject_reason) == ("ready", 4, 2, None, None)
    assert counters(program.db, program.run_id) == (1, 0, 0)
    (event,) = program.db.query(events.of_run, program.run_id, missing_places.UNFILLED)
    assert event.data == {"group_id": group.id, "group": "g", "started": 2, "group_size": 4}
    assert program.sweep(10_000) == []


def test_a_group_with_too_few_episodes_is_rejected_with_its_reason_and_gives_its_place_back(program):
    program.end(program.start())
    program.end(program.start(), SessionStatus.FAILED)
    assert program.sweep(program.limits.session_timeout_s) == [True]
    group, why = program.group(), "2 of 4 sessions started, 1 trainable, min_group_size is 2"
    assert (group.state, group.reject_reason) == ("rejected", why)
    reasons = program.db.query(lambda conn: conn.execute(select(trajectories.c.reason)).scalars().all())
    assert reasons == [f"rejected: {why}"]
    assert counters(program.db, program.run_id) == (1, 0, 1)


def test_a_start_after_that_is_refused_and_a_repeated_one_is_not(program):
    first = program.start("a")
    program.end(first)
    program.sweep(program.limits.session_timeout_s)
    with pytest.raises(RequestError, match=r"'g' takes no more sessions: 1 of 4 .*proxy\.session_timeout_s") as caught:
        program.start()
    assert (caught.value.status, caught.value.code, caught.value.param) == (409, "group_closed", "group")
    assert program.start("a") == first


@pytest.mark.long_on("postgresql")
def test_an_open_session_keeps_the_places_and_its_end_begins_the_wait(program):
    """One program plays its sessions one after the other, each longer than the time-out."""
    timeout_s = program.limits.session_timeout_s
    for _ in range(3):
        session_id = program.start()
        for _ in range(3):
            assert program.sweep(timeout_s) == [False]
        program.end(session_id)
        assert program.sweep(timeout_s - 1) == []
    assert program.sweep(1) == [True]
    assert program.group().state == "ready"


def test_an_outage_of_the_proxy_is_no_silence(program):
    program.end(program.start())
    program.heard_since = program.clock.now + 5000
    assert program.sweep(5000) == [False]
    assert program.sweep(program.limits.session_timeout_s - 1) == []
    assert program.sweep(1) == [True]


def test_a_group_that_is_filled_is_never_due(program):
    ids = [program.start() for _ in range(4)]
    assert program.sweep(100 * program.limits.session_timeout_s) == []
    for session_id in ids:
        program.end(session_id)
    assert (program.group().state, program.group().missing) == ("ready", 0)


def test_another_replica_that_checks_the_same_group_does_nothing(program):
    program.end(program.start())
    program.clock.now += program.limits.session_timeout_s
    check = (missing_places.check_due_group, program.group_id, program.limits)
    assert [program.db.transact(*check, heard_since=0.0) for _ in range(2)] == [True, False]
    assert counters(program.db, program.run_id) == (1, 0, 1)
