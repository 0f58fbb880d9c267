"""Groups that sessions join by name: who creates one, who joins it, who is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from concurrent_writes import counters, meanwhile, state
from play import call
from sqlalchemy import select

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import child_sessions
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.named_groups import start_in_group
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, sessions
from agentrl.store.training import rewards

TASK = {"q": 1}


class Starts:
    """Starts of sessions in a run, each with a key of its own unless given one."""

    def __init__(self, db: Database, run_id: str, limits: Limits) -> None:
        self.db, self.run_id, self.limits = db, run_id, limits

    def unit(self, name: str = "g", size: int = 3, task: Any = TASK, key: str | None = None) -> partial[NewGroup]:
        return partial(
            start_in_group,
            run_id=self.run_id,
            limits=self.limits,
            key_hash=key or new_id(),
            name=name,
            size=size,
            task=task,
            metadata={},
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NewGroup:
        return self.db.transact(self.unit(*args, **kwargs))

    def refused(self, *args: Any, **kwargs: Any) -> tuple[int, str | None, str | None]:
        with pytest.raises(RequestError) as caught:
            self(*args, **kwargs)
        return caught.value.status, caught.value.code, caught.value.param

    def play(self, session_id: str, value: float = 1.0) -> None:
        def unit(conn: Any) -> None:
            call(conn, self.run_id, session_id)
            rewards.add(conn, session_id, value=value, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, self.limits)

        self.db.transact(unit)

    def audit(self) -> list[str]:
        return self.db.query(lambda conn: list(run_audit.scan(conn, self.run_id)))


@pytest.fixture
def start(db: Database, run_id: str, limits: Limits) -> Starts:
    return Starts(db, run_id, limits)


def test_starts_of_a_name_fill_one_group_which_is_ready_when_all_have_ended(start):
    opened = []
    for i in range(3):
        new = start()
        opened.append(new)
        assert (new.group_id, new.first_index, new.new) == (opened[0].group_id, i, True)
        assert start.audit() == []
        start.play(new.session_ids[0], float(i))
        assert start.audit() == []
        assert state(start.db, new.group_id) == ("running" if i < 2 else "ready")
    assert counters(start.db, start.run_id) == (1, 0, 0)


def test_the_places_of_a_group_are_taken_once_and_joining_needs_none(start):
    start.limits = replace(start.limits, max_concurrent_groups=1)
    start()
    assert start.refused("other") == (429, "no_capacity", None)
    assert counters(start.db, start.run_id) == (1, 1, 0)
    assert start.db.query(lambda conn: conn.execute(select(groups.c.name)).scalars().all()) == ["g"]
    start()
    start()
    assert counters(start.db, start.run_id) == (1, 1, 0)
    assert start.audit() == []


def test_one_start_too_many_is_refused_before_and_after_the_group_is_ready(start):
    ids = [start().session_ids[0] for _ in range(3)]
    assert start.refused() == (409, "group_full", "group")
    for session_id in ids:
        start.play(session_id)
    assert start.refused() == (409, "group_full", "group")
    assert start.audit() == []


def test_another_size_or_task_is_refused_by_name(start):
    start()
    assert start.refused(size=4) == (409, "group_differs", "group_size")
    assert start.refused(task={"q": 2}) == (409, "group_differs", "task")
    assert start.refused(task=None) == (409, "group_differs", "task")
    start("without a task", task=None)
    assert start("without a task", task=None).first_index == 1


def test_a_repeated_start_gets_its_session_whatever_became_of_the_group(start):
    opened = {key: start(key=key) for key in "abc"}
    for _ in range(2):
        for key, earlier in opened.items():
            again = start(key=key)
            assert not again.new
            assert again == earlier
        for new in opened.values():
            if state(start.db, new.group_id) == "running":
                start.play(new.session_ids[0])
    assert start.audit() == []


def test_two_first_starts_at_once_make_one_group(start):
    first, second = meanwhile(start.db, start.unit(), start.unit())
    assert first.group_id == second.group_id
    assert {first.first_index, second.first_index} == {0, 1}
    assert counters(start.db, start.run_id) == (1, 1, 0)
    assert start.audit() == []


def test_a_first_start_that_is_undone_leaves_the_name_to_the_next(start):
    def fails(conn: Any) -> None:
        start.unit()(conn)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start.db.transact(fails)
    assert start().first_index == 0
    assert counters(start.db, start.run_id) == (1, 1, 0)


def test_the_last_place_goes_to_one_of_two(start):
    start()
    start()

    def second(conn: Any) -> Any:
        try:
            return start.unit()(conn)
        except RequestError as error:
            return error.code

    first, other = meanwhile(start.db, start.unit(), second)
    assert (first.first_index, other) == (2, "group_full")


def test_a_sub_agents_session_takes_no_place(start):
    parent = start().session_ids[0]
    start.db.transact(child_sessions.start_child, parent, start.limits, "child", {})
    assert [start().first_index for _ in range(2)] == [1, 2]
    query = select(sessions.c.sample_index).order_by(sessions.c.id)
    assert start.db.query(lambda conn: conn.execute(query).scalars().all()) == [0, 3, 1, 2]
    assert start.audit() == []


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_nothing_joins_a_group_of_a_run_that_has_ended(start, status):
    start(key="a")
    start.db.transact(runs.set_status, start.run_id, status)
    assert start.refused() == (409, f"run_{status}", None)
    assert start.refused("other") == (409, f"run_{status}", None)
    assert not start(key="a").new


def test_a_group_of_one_is_full_at_once(start):
    start.limits = replace(start.limits, min_group_size=1)
    new = start(size=1)
    assert start.refused(size=1)[1] == "group_full"
    start.play(new.session_ids[0])
    assert state(start.db, new.group_id) == "ready"
