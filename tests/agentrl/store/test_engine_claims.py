"""Claims on an engine's weights: one replica at a time, for a bounded time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event, select

from agentrl.store import Database, engine_claims, fleet
from agentrl.store.tables import engines as engines_table

URL = "http://127.0.0.1:30000"


def claim(db: Database, run_id: str, replica: str, seconds: float = 60.0) -> str | None:
    """None, or the replica that has the claim."""
    claimed, engine = db.transact(engine_claims.claim, run_id, URL, False, replica, seconds)
    return None if claimed else engine.updater


def row(db: Database, run_id: str) -> dict[str, Any]:
    with db.read() as conn:
        return dict(conn.execute(select(engines_table).where(engines_table.c.run_id == run_id)).one()._mapping)


def test_one_replica_holds_a_claim_until_it_releases_it(db, run_id):
    assert claim(db, run_id, "a") is None  # which the store did not know yet
    assert row(db, run_id)["state"] == "dead"
    assert claim(db, run_id, "b") == "a"
    assert claim(db, run_id, "a") is None  # as after a restart
    db.transact(engine_claims.release, run_id, URL, "b", True)
    assert claim(db, run_id, "b") == "a"
    db.transact(engine_claims.release, run_id, URL, "a", True)
    assert claim(db, run_id, "b") is None
    assert claim(db, run_id, "a") == "b"


def test_the_claim_of_a_dead_replica_expires(db, run_id):
    before = time.time()
    assert claim(db, run_id, "a", 60) is None
    assert before + 60 <= row(db, run_id)["updating_until"] <= time.time() + 60
    assert claim(db, run_id, "a", -1) is None
    assert claim(db, run_id, "b") is None
    db.transact(engine_claims.release, run_id, URL, "a", True)  # too late: it is b's
    assert claim(db, run_id, "a") == "b"


def test_a_new_replica_holds_no_claims_of_an_earlier_one(db, run_id):
    """Its claims are those of an earlier replica with its name."""
    assert claim(db, run_id, "a") is None
    db.transact(engine_claims.expire_claims, run_id, "b")
    assert claim(db, run_id, "b") == "a"
    db.transact(engine_claims.expire_claims, run_id, "a")
    assert not db.query(engine_claims.is_whole, run_id, URL)
    assert claim(db, run_id, "b") is None


def test_incomplete_weights_can_be_claimed_and_are_marked(db, run_id):
    assert db.query(engine_claims.is_whole, run_id, URL)
    assert claim(db, run_id, "a") is None
    assert not db.query(engine_claims.is_whole, run_id, URL)
    db.transact(engine_claims.release, run_id, URL, "a", False)
    assert not db.query(engine_claims.is_whole, run_id, URL)
    assert claim(db, run_id, "b") is None
    db.transact(engine_claims.release, run_id, URL, "b", True)
    assert db.query(engine_claims.is_whole, run_id, URL)


def test_a_new_start_keeps_the_claims_of_its_engines_and_deletes_other_engines(db, run_id):
    for url in (URL, URL + "1"):
        saw(db, run_id, url)
        db.transact(engine_claims.claim, run_id, url, False, "a", 60)
    db.transact(engine_claims.forget, run_id, [URL])
    assert (row(db, run_id)["url"], row(db, run_id)["state"], row(db, run_id)["updater"]) == (URL, "dead", "a")


def test_claims_are_per_engine_and_per_run(db, run_id):
    assert claim(db, run_id, "a") is None
    assert db.transact(engine_claims.claim, run_id, URL + "1", False, "b", 60)[0]


def test_one_of_many_concurrent_claims_succeeds(db, run_id):
    together = threading.Barrier(8)

    def attempt(i: int) -> str | None:
        together.wait()
        return claim(db, run_id, f"r{i}")

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(attempt, range(8)))
        winner = found.index(None)
        assert [who for who in found if who] == [f"r{winner}"] * 7
        db.transact(engine_claims.release, run_id, URL, f"r{winner}", True)


def saw(db: Database, run_id: str, url: str = URL, *, known: int = 9, **columns: Any) -> None:
    values = {"state": "serving", "version": 0, "error": None} | columns
    assert db.transact(fleet.save, run_id, url, known=known, joined=False, replica="a", **values)[0]


def test_saving_an_engine_state_changes_neither_its_claim_nor_its_draining(db, run_id):
    saw(db, run_id)
    db.transact(engine_claims.set_draining, run_id, URL, True, "a")
    assert claim(db, run_id, "a") is None
    saw(db, run_id, state="updating", version=1, error="e")
    assert claim(db, run_id, "b") == "a"
    found = row(db, run_id)
    assert (found["state"], found["version"], found["error"], found["draining"]) == ("updating", 1, "e", True)


def test_every_change_of_an_engine_is_counted(db, run_id):
    """Replicas read the rows whose count has grown."""
    counts = []
    for change in (
        lambda: claim(db, run_id, "a"),
        lambda: claim(db, run_id, "b"),  # in vain
        lambda: saw(db, run_id),
        lambda: db.transact(engine_claims.release, run_id, URL, "a", True),
        lambda: db.transact(engine_claims.set_draining, run_id, URL, True, "a"),
        lambda: claim(db, run_id, "c"),
        lambda: db.transact(engine_claims.expire_claims, run_id, "c"),
        lambda: db.transact(engine_claims.forget, run_id, [URL]),
    ):
        change()
        counts.append(row(db, run_id)["changes"])
    assert counts == [1, 1, 2, 3, 4, 5, 6, 7]


def together(db: Database, *units: tuple[Any, ...]) -> list[Any]:
    """Results of units that the group commit runs in one batch, and how many statements it took."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    event.listen(db.engine, "before_cursor_execute", counted)
    with db.write() as conn:
        many = units[0][0].many(conn, [args for _, *args in units])
    event.remove(db.engine, "before_cursor_execute", counted)
    return [*many, count]


@pytest.mark.parametrize("joined", [True, False])
def test_engines_are_claimed_saved_and_released_together_in_one_statement_each(db, run_id, joined):
    urls = [f"{URL}{n}" for n in range(20)]
    for url in urls:
        saw(db, run_id, url, known=0)
    *claimed, claims = together(db, *((engine_claims.claim, run_id, url, joined, "a", 60.0) for url in urls))
    assert [(done, engine.url, engine.updater) for done, engine in claimed] == [(True, url, "a") for url in urls]
    state = ("a", "serving", 1, None)
    *saved, saves = together(db, *((fleet.save, run_id, url, 2, True, *state) for url in urls))
    assert [(recorded, engine.url, engine.version) for recorded, engine in saved] == [(True, url, 1) for url in urls]
    *freed, releases = together(db, *((engine_claims.release, run_id, url, "a", True) for url in urls))
    assert [(done, engine.url, engine.updater) for done, engine in freed] == [(True, url, None) for url in urls]
    assert {engine.changes for _, engine in freed} == {4}
    assert (claims, saves, releases) == (1, 1, 1)


def test_claims_made_together_do_not_take_engines_of_another_replica(db, run_id):
    urls = [f"{URL}{n}" for n in range(3)]
    db.transact(engine_claims.claim, run_id, urls[1], False, "b", 60)
    *claimed, _ = together(db, *((engine_claims.claim, run_id, url, False, "a", 60.0) for url in [*urls, urls[0]]))
    assert [(done, engine.updater) for done, engine in claimed] == [(True, "a"), (False, "b"), (True, "a"), (True, "a")]
    *freed, _ = together(db, *((engine_claims.release, run_id, url, "a", False) for url in urls))
    assert [(done, engine.updater, engine.updating_until == 0.0) for done, engine in freed] == [
        (True, "a", True),
        (False, "b", False),
        (True, "a", True),
    ]
    *gone, _ = together(db, (engine_claims.release, run_id, "http://gone", "a", True))
    assert gone == [(False, None)]


def test_an_engine_that_has_left_is_not_claimed_and_gets_no_row(db, run_id):
    urls = [f"{URL}{n}" for n in range(3)]
    for url in urls:
        db.transact(fleet.join, run_id, url, 60.0, "a")
    db.transact(fleet.leave, run_id, urls[1], "a")
    *claimed, _ = together(db, *((engine_claims.claim, run_id, url, True, "a", 60.0) for url in urls))
    assert [(done, engine and engine.updater) for done, engine in claimed] == [(True, "a"), (False, None), (True, "a")]
    assert {engine["url"] for engine in db.query(engine_claims.of_run, run_id)} == {urls[0], urls[2]}


def test_states_saved_together_are_refused_for_changed_rows(db, run_id):
    urls = [f"{URL}{n}" for n in range(3)]
    for url in urls[:2]:
        saw(db, run_id, url, known=0)
    claimed = db.transact(engine_claims.claim, run_id, urls[1], False, "b", 60)[1]
    found = [
        (fleet.save, run_id, urls[0], 1, False, "a", "updating", 0, None),
        (fleet.save, run_id, urls[1], 1, False, "a", "updating", 0, None),  # since claimed
        (fleet.save, run_id, urls[2], 0, False, "a", "updating", 0, None),  # a new row
        (fleet.save, run_id, "http://gone", 1, True, "a", "updating", 0, None),  # has left
        (fleet.save, run_id, "http://listed", 1, False, "a", "dead", None, "e\0"),  # its row was deleted
    ]
    *saved, _ = together(db, *found)
    assert [recorded for recorded, _ in saved] == [True, False, True, False, True]
    assert saved[1][1] == claimed
    assert saved[3][1] is None
    assert (saved[4][1].state, saved[4][1].changes) == ("dead", 1)
