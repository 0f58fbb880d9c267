"""Claims on an engine's weights: one replica at a time, for a bounded time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import select

from agentrl.store import Database, engine_turns
from agentrl.store.tables import engines as engines_table

URL = "http://127.0.0.1:30000"


def take(db: Database, run_id: str, replica: str, seconds: float = 60.0) -> str | None:
    return db.transact(engine_turns.claim, run_id, URL, replica, seconds)


def row(db: Database, run_id: str) -> dict[str, Any]:
    with db.read() as conn:
        return dict(conn.execute(select(engines_table).where(engines_table.c.run_id == run_id)).one()._mapping)


def test_an_engine_is_one_replicas_until_it_is_given_back(db, run_id):
    assert take(db, run_id, "a") is None  # which the store did not know yet
    assert row(db, run_id)["state"] == "dead"
    assert take(db, run_id, "b") == "a"
    assert take(db, run_id, "a") is None  # as after a restart
    db.transact(engine_turns.release, run_id, URL, "b", True)
    assert take(db, run_id, "b") == "a"
    db.transact(engine_turns.release, run_id, URL, "a", True)
    assert take(db, run_id, "b") is None
    assert take(db, run_id, "a") == "b"


def test_the_claim_of_a_dead_replica_expires(db, run_id):
    before = time.time()
    assert take(db, run_id, "a", 60) is None
    assert before + 60 <= row(db, run_id)["updating_until"] <= time.time() + 60
    assert take(db, run_id, "a", -1) is None
    assert take(db, run_id, "b") is None
    db.transact(engine_turns.release, run_id, URL, "a", True)  # too late: it is b's
    assert take(db, run_id, "a") == "b"


def test_a_replica_that_starts_has_taken_nothing(db, run_id):
    """What it had was left by one of its name."""
    assert take(db, run_id, "a") is None
    db.transact(engine_turns.expire_claims, run_id, "b")
    assert take(db, run_id, "b") == "a"
    db.transact(engine_turns.expire_claims, run_id, "a")
    assert not db.query(engine_turns.is_whole, run_id, URL)
    assert take(db, run_id, "b") is None


def test_incomplete_weights_can_be_claimed_and_are_marked(db, run_id):
    assert db.query(engine_turns.is_whole, run_id, URL)
    assert take(db, run_id, "a") is None
    assert not db.query(engine_turns.is_whole, run_id, URL)
    db.transact(engine_turns.release, run_id, URL, "a", False)
    assert not db.query(engine_turns.is_whole, run_id, URL)
    assert take(db, run_id, "b") is None
    db.transact(engine_turns.release, run_id, URL, "b", True)
    assert db.query(engine_turns.is_whole, run_id, URL)


def test_a_new_start_knows_of_engines_that_others_run_whether_they_were_left(db, run_id):
    for url in (URL, URL + "1"):
        db.transact(engine_turns.save, run_id, url, state="serving", version=0, error=None)
        db.transact(engine_turns.claim, run_id, url, "a", 60)
    db.transact(engine_turns.forget, run_id, [URL])
    assert (row(db, run_id)["url"], row(db, run_id)["state"], row(db, run_id)["updater"]) == (URL, "dead", "a")


def test_each_engine_and_each_run_has_its_own(db, run_id):
    assert take(db, run_id, "a") is None
    assert db.transact(engine_turns.claim, run_id, URL + "1", "b", 60) is None


def test_of_many_that_take_it_at_once_one_has_it(db, run_id):
    together = threading.Barrier(8)

    def attempt(i: int) -> str | None:
        together.wait()
        return take(db, run_id, f"r{i}")

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(attempt, range(8)))
        winner = found.index(None)
        assert [who for who in found if who] == [f"r{winner}"] * 7
        db.transact(engine_turns.release, run_id, URL, f"r{winner}", True)


def test_saving_an_engine_state_changes_neither_its_claim_nor_its_draining(db, run_id):
    db.transact(engine_turns.save, run_id, URL, state="serving", version=0, error=None)
    db.transact(engine_turns.set_draining, run_id, URL, True, "a")
    assert take(db, run_id, "a") is None
    db.transact(engine_turns.save, run_id, URL, state="updating", version=1, error="e")
    assert take(db, run_id, "b") == "a"
    found = row(db, run_id)
    assert (found["state"], found["version"], found["error"], found["draining"]) == ("updating", 1, "e", True)
    assert db.query(engine_turns.drained, run_id) == {URL}
