"""Built sessions of a traced run wait until they are sent; each is claimed by one sender at a time."""

from __future__ import annotations

import threading
from dataclasses import replace

import play
import pytest

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database
from agentrl.store.sessions.ends import trace_outbox


@pytest.fixture
def traced(limits):
    return replace(limits, traced=True, max_staleness=1000)


def test_a_session_waits_once_it_is_built_and_only_in_a_traced_run(db, run_id, limits, traced):
    play.group(db, run_id, limits)
    assert db.query(trace_outbox.waiting, run_id) == 0
    new = play.open_group(db, run_id, traced)
    assert not db.query(trace_outbox.is_due, run_id)
    play.end(db, new.session_ids[0], traced)
    assert db.transact(trace_outbox.claim, run_id, 10, 60.0) == [new.session_ids[0]]
    play.end(db, new.session_ids[1], traced, SessionStatus.FAILED)
    assert db.query(trace_outbox.waiting, run_id) == 2
    play.end(db, new.session_ids[1], traced)
    assert db.query(trace_outbox.waiting, run_id) == 2


def test_claims_exclude_each_other_and_end(db, run_id, traced):
    for _ in range(2):
        play.group(db, run_id, traced)
    first = db.transact(trace_outbox.claim, run_id, 3, 60.0)
    second = db.transact(trace_outbox.claim, run_id, 3, 0.0)
    assert (len(first), len(second)) == (3, 1)
    assert not set(first) & set(second)
    assert db.transact(trace_outbox.claim, run_id, 3, 60.0) == second
    assert not db.query(trace_outbox.is_due, run_id)
    db.transact(trace_outbox.release, first[:1])
    assert db.transact(trace_outbox.claim, run_id, 3, 60.0) == first[:1]
    db.transact(trace_outbox.sent, [*first, *second])
    assert db.query(trace_outbox.waiting, run_id) == 0


@pytest.mark.long_on("sqlite")
def test_senders_that_claim_at_once_get_different_sessions(db, run_id, traced, database_url):
    for _ in range(10):
        play.group(db, run_id, traced)
    got: list[list[str]] = [[], [], []]

    def take(mine: list[str]) -> None:
        own = Database(database_url)
        while found := own.transact(trace_outbox.claim, run_id, 2, 60.0):
            mine += found
        own.close()

    threads = [threading.Thread(target=take, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claimed = [session_id for mine in got for session_id in mine]
    assert len(claimed) == len(set(claimed)) == 20
