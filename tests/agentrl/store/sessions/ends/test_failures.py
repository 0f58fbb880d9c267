"""A run whose newest sessions all fail is stopped with the reason; a run with a success is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from play import group, open_group
from sqlalchemy import select

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError, UserError
from agentrl.store import Database, events, runs
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import failures, sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import sessions as sessions_table

Fail = Callable[..., list[str]]


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return replace(limits, max_failures_in_a_row=6, max_staleness=100)


@pytest.fixture
def fail(db: Database, run_id: str, limits: Limits) -> Fail:
    """Start a group of two and fail its sessions; returns their ids."""

    def play(error: str = "boom", owner: str | None = None, status: SessionStatus = SessionStatus.FAILED) -> list[str]:
        with db.write() as conn:
            keys = [codec.new_id() for _ in range(2)]
            new = group_starts.start_group(conn, run_id, limits, keys, owner=owner)
            for session_id in new.session_ids:
                sealing.end(conn, session_id, status, error, limits)
        return new.session_ids

    return play


def status(db: Database, run_id: str) -> tuple[str, str | None]:
    row = db.query(runs.get, run_id)
    return row.status, row.error


def test_the_run_fails_and_says_which_session_and_why(db, run_id, limits, fail):
    for _ in range(2):
        fail()
        assert status(db, run_id) == ("running", None)
    *_, last = fail("RuntimeError: no SDK")
    why = f"6 sessions in a row failed (rollout.max_failures_in_a_row); the last, {last}: RuntimeError: no SDK"
    assert status(db, run_id) == ("failed", why)
    (event,) = db.query(events.of_run, run_id, failures.STOPPED)
    assert event.data == {"failures": 6, "session_id": last, "error": why}
    for start in (
        lambda conn: group_starts.start_group(conn, run_id, limits, ["a", "b"]),
        lambda conn: group_starts.start_external(conn, run_id, limits, "c", {}, {}),
        lambda conn: group_starts.start_evaluation(conn, run_id, limits, ["d"], {}, {}, None),
    ):
        with pytest.raises(RequestError, match="run test is failed: 6 sessions in a row failed") as refused:
            db.transact(start)
        assert (refused.value.status, refused.value.code) == (409, "run_failed")


def test_displays_show_the_error_when_all_newest_sessions_failed(db, run_id, limits, fail):
    limits = replace(limits, max_failures_in_a_row=None)
    with db.write() as conn:
        for number in range(failures.LOOKED_AT):
            assert failures.newest_error(conn, run_id) is None
            new = group_starts.start_evaluation(conn, run_id, limits, [str(number)], {}, {}, None)
            sealing.end(conn, new.session_ids[0], SessionStatus.FAILED, f"boom {number}", limits)
        assert failures.newest_error(conn, run_id) == f"boom {failures.LOOKED_AT - 1}"
    group(db, run_id, limits)
    assert db.query(failures.newest_error, run_id) is None


def test_failures_of_several_workers_and_of_evaluations_count_together(db, run_id, limits, fail):
    fail(owner="one/1")
    fail(owner="two/1")
    for name in ("e", "f"):
        assert status(db, run_id) == ("running", None)
        with db.write() as conn:
            new = group_starts.start_evaluation(conn, run_id, limits, [name], {}, {}, None, owner="two/1")
            sealing.end(conn, new.session_ids[0], SessionStatus.FAILED, "boom", limits)
    assert status(db, run_id)[0] == "failed"


def test_a_successful_session_restarts_the_failure_count(db, run_id, limits, fail):
    for _ in range(2):
        for _ in range(2):
            fail()
        group(db, run_id, limits)
    fail()
    new = open_group(db, run_id, limits)
    with db.write() as conn:  # a group that fails in part
        sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, limits)
        sealing.end(conn, new.session_ids[1], SessionStatus.FAILED, "boom", limits)
    for _ in range(2):
        fail()
    assert status(db, run_id) == ("running", None)


def test_an_older_open_session_keeps_the_run_from_failing(db, run_id, limits, fail):
    with db.write() as conn:
        slow = group_starts.start_group(conn, run_id, limits, ["s", "t"], owner="slow/1")
    for _ in range(5):
        fail(owner="broken/1")
    assert status(db, run_id) == ("running", None)
    with db.write() as conn:  # it does: the failures around it are not all there is
        for session_id in slow.session_ids:
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    fail(owner="broken/1")
    for _ in range(2):
        assert status(db, run_id) == ("running", None)
        fail(owner="broken/1")
    assert status(db, run_id)[0] == "failed"


def test_an_open_session_of_a_worker_without_failures_keeps_the_run_from_failing(db, run_id, limits, fail):
    fail(owner="broken/1")
    with db.write() as conn:  # begun after the first failure, so none of them is from before the row
        slow = group_starts.start_group(conn, run_id, limits, ["s", "t"], owner="slow/1")
        own = group_starts.start_group(conn, run_id, limits, ["u", "v"], owner="broken/1")
    for _ in range(4):
        fail(owner="broken/1")
    assert status(db, run_id) == ("running", None)
    with db.write() as conn:
        for session_id in slow.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "boom", limits)
    assert status(db, run_id) == ("running", None)  # those of its own may, while they are from before
    with db.write() as conn:
        for session_id in own.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "boom", limits)
    assert status(db, run_id)[0] == "failed"


def test_abandoned_sessions_do_not_count_as_failures(db, run_id, limits, fail):
    for _ in range(4):
        fail(status=SessionStatus.ABANDONED)
    for _ in range(2):
        fail()
    assert status(db, run_id) == ("running", None)
    fail()
    assert status(db, run_id)[0] == "failed"


def test_a_resumed_run_restarts_the_failure_count(db, run_id, limits, fail):
    for _ in range(3):
        fail()
    assert status(db, run_id)[0] == "failed"
    db.transact(runs.resume, run_id)
    for _ in range(2):
        assert status(db, run_id) == ("running", None)
        fail()
    with db.write() as conn:
        runs.reopen(conn, run_id, key="k", config={}, steps=10)
    for _ in range(3):
        assert status(db, run_id) == ("running", None)
        fail()
    assert status(db, run_id)[0] == "failed"
    with db.write() as conn:
        runs.set_status(conn, run_id, "finished")
        with pytest.raises(UserError, match="run test is finished"):
            runs.resume(conn, run_id)


def test_greedy_episodes_that_all_fail_stop_the_run_whatever_the_samples_did(db, run_id, limits):
    """Each of them rejects its group: the run would play groups without end, and train none."""
    limits = replace(limits, greedy_baseline=True, max_failures_in_a_row=2, max_staleness=100)

    def play(greedy: SessionStatus) -> str:
        with db.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(limits.most_sessions)])
            for session_id in new.session_ids:
                ended = greedy if session_id == new.session_ids[-1] else SessionStatus.COMPLETED
                sealing.end(conn, session_id, ended, "too hot" if ended == SessionStatus.FAILED else None, limits)
        return new.session_ids[-1]

    for _ in range(2):
        for ended in (SessionStatus.FAILED, SessionStatus.ABANDONED, SessionStatus.COMPLETED):
            play(ended)
    play(SessionStatus.FAILED)
    assert status(db, run_id) == ("running", None)
    last = play(SessionStatus.FAILED)
    why = f"2 greedy episodes in a row failed (rollout.max_failures_in_a_row); the last, {last}: too hot"
    assert status(db, run_id) == ("failed", why)


def test_a_run_may_ask_not_to_be_stopped(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(2)])
        for session_id in new.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "boom", replace(limits, max_failures_in_a_row=None))
        assert conn.execute(select(sessions_table.c.status).distinct()).scalars().all() == ["failed"]
    assert status(db, run_id) == ("running", None)
