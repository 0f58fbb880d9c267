"""One runner owns a rank at a time, by the database's clock; a gang moves to its next attempt once per death."""

from __future__ import annotations

import pytest

from agentrl.store import Database, events, part_ranks
from agentrl.store.db.clock import database_time

SPEC = {"name": "trainer", "argv": ["trainer"]}
HERE = {"host": "a", "address": "10.0.0.1"}
WINDOW_S = 600.0


@pytest.fixture
def part(db: Database, run_id: str) -> str:
    db.transact(part_ranks.declare, run_id, {"trainer": SPEC})
    return "trainer"


def claimed(db: Database, run_id: str, runner: str, rank: int = 0, lease_s: float = 60.0) -> bool:
    return db.transact(claim, run_id, runner, rank, lease_s)


def claim(conn, run_id, runner, rank, lease_s):
    return part_ranks.claim(conn, run_id, "trainer", rank, runner, **HERE, lease_s=lease_s) is not None


def die(conn, run_id, rank, attempt, gang=True):
    return part_ranks.died(conn, run_id, "trainer", rank, attempt=attempt, gang=gang, status=1, window_s=WINDOW_S)


def test_the_clock_of_the_database_advances(db):
    first = db.query(database_time)
    assert 1.7e9 < first <= db.query(database_time)


def test_a_second_runner_waits_until_the_lease_is_over(db, run_id, part):
    assert claimed(db, run_id, "first", lease_s=60)
    assert not claimed(db, run_id, "second")
    assert db.transact(part_ranks.renew, run_id, part, 0, "first", -1.0)  # the lease is over now
    assert claimed(db, run_id, "second")
    assert db.transact(part_ranks.renew, run_id, part, 0, "first", 60.0) is None  # it has lost the rank
    db.transact(part_ranks.announce, run_id, part, 0, "first", 1, {"rdzv": 1})
    db.transact(part_ranks.release, run_id, part, 0, "first", 0)
    (rank,) = db.query(part_ranks.ranks, run_id)
    assert (rank.runner, rank.state, rank.ports, rank.live) == ("second", "waiting", {}, True)


@pytest.mark.long_on("postgresql")
def test_a_released_rank_is_free_at_once(db, run_id, part):
    assert claimed(db, run_id, "first")
    db.transact(part_ranks.started, run_id, part, 0, "first", 99)
    db.transact(part_ranks.release, run_id, part, 0, "first", 143)
    (rank,) = db.query(part_ranks.ranks, run_id)
    assert (rank.state, rank.status, rank.pid, rank.starts, rank.live) == ("ended", 143, None, 1, False)
    assert db.transact(part_ranks.renew, run_id, part, 0, "first", 60.0) is None
    assert claimed(db, run_id, "second")


def test_deaths_of_one_attempt_of_a_gang_count_once(db, run_id, part):
    assert db.transact(die, run_id, 1, 1) == 1
    assert db.transact(die, run_id, 0, 1) == 1  # it ended because rank 1 did
    assert db.query(part_ranks.order, run_id, part).attempt == 2
    assert db.transact(die, run_id, 0, 2) == 2
    assert db.query(part_ranks.order, run_id, part).attempt == 3
    assert [e.data["rank"] for e in db.query(events.of_run, run_id, "part_died")] == [1, 0]


def test_ranks_that_are_no_gang_die_alone(db, run_id, part):
    assert [db.transact(die, run_id, rank, 1, False) for rank in (0, 1)] == [1, 2]
    assert db.query(part_ranks.order, run_id, part).attempt == 1


def test_parts_that_a_new_start_does_not_name_stop_and_failures_are_forgotten(db, run_id, part):
    db.transact(part_ranks.give_up, run_id, part, "died 6 times")
    db.transact(part_ranks.give_up, run_id, part, "a later reason")
    assert db.query(part_ranks.failures, run_id) == {"trainer": "died 6 times"}
    assert db.query(part_ranks.order, run_id, part) == part_ranks.Order("running", 1, "died 6 times")
    db.transact(part_ranks.declare, run_id, {"proxy": SPEC})
    assert db.query(part_ranks.order, run_id, part).wanted == "stopped"
    assert db.query(part_ranks.order, run_id, "proxy").wanted == "running"
    db.transact(part_ranks.declare, run_id, {"trainer": SPEC})
    assert db.query(part_ranks.order, run_id, part) == part_ranks.Order("running", 2, None)
    db.transact(part_ranks.declare, run_id, {"trainer": SPEC})  # again, while it runs
    assert db.query(part_ranks.order, run_id, part) == part_ranks.Order("running", 2, None)
    assert db.query(part_ranks.order, run_id, "unknown") is None


def test_a_claimed_rank_names_its_previous_owner(db, run_id, part):
    claimed(db, run_id, "first")
    db.transact(part_ranks.announce, run_id, part, 0, "first", 4, {"rdzv": 29500})
    db.transact(part_ranks.renew, run_id, part, 0, "first", -1.0)
    before = db.transact(part_ranks.claim, run_id, part, 0, "second", host="b", address="10.0.0.2", lease_s=5.0)
    assert (before.runner, before.host, before.attempt, before.live) == ("first", "a", 4, False)
