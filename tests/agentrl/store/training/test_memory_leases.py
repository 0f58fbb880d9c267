"""Whose turn it is on shared GPUs: granted, renewed, handed back, ended and expired by the database's clock."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from agentrl.errors import FencedError
from agentrl.store import Database, events, fleet, runs
from agentrl.store.db import clock
from agentrl.store.tables import weight_versions
from agentrl.store.training import memory_leases, publishes, trainer_epochs
from agentrl.store.training.publishes import Wanted

URL = "http://127.0.0.1:30000"


@pytest.fixture
def epoch(db: Database, run_id: str) -> int:
    return db.transact(trainer_epochs.begin_epoch, run_id)


def grant(db: Database, run_id: str, epoch: int, lease_s: float = 60.0) -> list[str]:
    return db.transact(memory_leases.grant, run_id, epoch, lease_s, "r")


def wanted(db: Database, run_id: str, reported: int | None = None) -> Wanted:
    return db.query(publishes.version_to_serve, run_id, reported)


def told(db: Database, run_id: str, kind: str) -> list[Any]:
    return [event.data for event in db.query(events.of_run, run_id, kind)]


def new_version(conn: Connection, run_id: str, version: int, state: str = "pending") -> None:
    row = {"run_id": run_id, "version": version, "parent_version": 0, "step": version, "path": "/p", "checksum": "c"}
    conn.execute(insert(weight_versions).values(**row, state=state, created_at=time.time()))


def test_the_clock_is_the_databases(db):
    before = time.time()
    now = db.query(lambda conn: conn.execute(select(clock.now())).scalar_one())
    assert before - 1 <= now <= time.time() + 1


def test_engines_release_their_memory_when_a_trainer_is_granted_it(db, run_id, epoch):
    assert wanted(db, run_id) == Wanted(0)
    assert grant(db, run_id, epoch) == []
    assert grant(db, run_id, epoch) == []  # more time
    assert wanted(db, run_id) == wanted(db, run_id, 0) == Wanted(0, released=True)
    assert db.query(memory_leases.is_held, run_id)
    assert told(db, run_id, "memory_granted") == [{"epoch": epoch}]


def test_a_turn_that_is_not_renewed_ends(db, run_id, epoch):
    grant(db, run_id, epoch, -1.0)
    assert wanted(db, run_id) == Wanted(0, expired=True)
    assert not db.transact(memory_leases.renew, run_id, epoch, 60.0)
    assert not db.query(memory_leases.is_held, run_id)
    db.transact(memory_leases.expire, run_id, "r")
    db.transact(memory_leases.expire, run_id, "r")
    assert wanted(db, run_id) == Wanted(0)
    assert told(db, run_id, "memory_returned") == [{"epoch": epoch, "why": "its lease ended"}]


def test_a_turn_that_is_renewed_goes_on(db, run_id, epoch):
    grant(db, run_id, epoch, 0.5)
    assert db.transact(memory_leases.renew, run_id, epoch, 60.0)
    db.transact(memory_leases.expire, run_id, "r")
    assert wanted(db, run_id).released


def test_a_newer_trainer_takes_the_turn_over(db, run_id, epoch):
    grant(db, run_id, epoch)
    newer = db.transact(trainer_epochs.begin_epoch, run_id)
    with pytest.raises(FencedError):
        grant(db, run_id, epoch)
    assert db.transact(memory_leases.renew, run_id, epoch, 60.0)  # it may still be computing
    assert grant(db, run_id, newer) == []
    assert not db.transact(memory_leases.renew, run_id, epoch, 60.0)
    assert db.transact(memory_leases.renew, run_id, newer, 60.0)


def test_engines_without_weights_wait_for_the_publish_that_ends_the_turn(db, run_id, epoch, monkeypatch):
    grant(db, run_id, epoch)
    db.transact(new_version, run_id, 1)
    assert not db.transact(memory_leases.hand_back, run_id, None, 1)  # a replica that finishes a publish
    assert not db.transact(memory_leases.hand_back, run_id, epoch + 1, 1)
    assert wanted(db, run_id).released
    assert db.transact(memory_leases.hand_back, run_id, epoch, 1)
    assert wanted(db, run_id) == Wanted(1, released=True)
    assert wanted(db, run_id, 1) == Wanted(1)
    assert wanted(db, run_id, 0) == Wanted(0)  # it has weights: the publish updates it
    monkeypatch.setattr(memory_leases, "HANDING_S", -1.0)
    assert db.transact(memory_leases.hand_back, run_id, epoch, 1)
    assert wanted(db, run_id) == wanted(db, run_id, 1) == Wanted(1)
    assert not db.transact(memory_leases.renew, run_id, epoch, 60.0)
    assert db.transact(memory_leases.hand_back, run_id, None, 1)
    db.transact(publishes.complete, run_id, 1, epoch, {}, 0.0)
    assert wanted(db, run_id) == Wanted(1)
    assert not db.query(memory_leases.is_held, run_id)


def test_a_published_version_that_was_rolled_back_is_not_loaded(db, run_id, epoch, monkeypatch):
    monkeypatch.setattr(memory_leases, "HANDING_S", -1.0)
    grant(db, run_id, epoch)
    db.transact(new_version, run_id, 1, "rolled_back")
    db.transact(memory_leases.hand_back, run_id, epoch, 1)
    assert wanted(db, run_id) == Wanted(0)
    assert grant(db, run_id, epoch) == []
    assert wanted(db, run_id).released


def test_only_its_trainer_ends_a_turn(db, run_id, epoch):
    grant(db, run_id, epoch)
    db.transact(memory_leases.end, run_id, epoch - 1, "r")
    assert wanted(db, run_id).released
    db.transact(memory_leases.end, run_id, epoch, "r")
    assert wanted(db, run_id) == Wanted(0)
    assert told(db, run_id, "memory_returned") == [{"epoch": epoch, "why": "asked to"}]


def test_no_engine_starts_in_the_trainers_turn(db, run_id, epoch):
    grant(db, run_id, epoch)
    assert not db.transact(memory_leases.may_start, run_id, URL, 60.0)
    db.transact(memory_leases.end, run_id, epoch, "r")
    assert db.transact(memory_leases.may_start, run_id, URL, 60.0)


def ends(conn: Connection, run_id: str) -> None:
    memory_leases.has_ended(conn, run_id, URL)


def answers(conn: Connection, run_id: str) -> None:
    fleet.save(conn, run_id, URL, known=9, joined=False, replica="r", state="serving", version=0, error=None)


def is_forgotten(conn: Connection, run_id: str) -> None:
    memory_leases.forget(conn, run_id)


@pytest.mark.parametrize("stops_starting", [ends, answers, is_forgotten])
def test_nothing_is_granted_while_an_engine_starts(db, run_id, epoch, stops_starting):
    assert db.transact(memory_leases.may_start, run_id, URL, 60.0)
    refused = {"state": "dead", "version": None, "error": "refused"}
    db.transact(fleet.save, run_id, URL, known=9, joined=False, replica="r", **refused)
    assert grant(db, run_id, epoch) == [URL]
    assert not db.query(memory_leases.is_held, run_id)
    db.transact(stops_starting, run_id)
    assert grant(db, run_id, epoch) == []


def test_an_engine_that_does_not_start_in_time_is_not_waited_for(db, run_id, epoch):
    assert db.transact(memory_leases.may_start, run_id, URL, -1.0)
    assert grant(db, run_id, epoch) == []


def test_a_trainer_whose_process_has_ended_has_no_turn(db, run_id, epoch):
    grant(db, run_id, epoch)
    db.transact(memory_leases.trainer_ended, run_id, "r")
    db.transact(memory_leases.trainer_ended, run_id, "r")
    assert wanted(db, run_id) == Wanted(0)
    assert told(db, run_id, "memory_returned") == [{"epoch": epoch, "why": "the trainer ended"}]


def test_a_forgotten_turn_gives_the_memory_back(db, run_id, epoch):
    grant(db, run_id, epoch)
    db.transact(memory_leases.forget, run_id)
    assert wanted(db, run_id) == Wanted(0)
    assert db.query(runs.get, run_id).current_version == 0
