"""Engines join a run, renew their lease and leave; replicas read what changed, and record what they see."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import select, update

from agentrl.errors import RequestError
from agentrl.store import Database, engine_claims, events, fleet, heartbeats
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.tables import engines

URL = "http://127.0.0.1:30000"


def read(db: Database, run_id: str, since: News | None = None) -> News:
    return db.query(fleet.news, run_id, since, 60.0)


def urls(db: Database, run_id: str) -> list[str]:
    return [member.url for member in read(db, run_id).members]


def recorded(db: Database, run_id: str, kind: str) -> list[object]:
    return [event.data for event in db.query(events.of_run, run_id, kind)]


def saw(
    db: Database, run_id: str, known: int, state: str = "serving", url: str = URL, joined: bool = True, **columns: Any
) -> tuple[bool, Member | None]:
    values = {"state": state, "version": 1, "error": None, "replica": "r"} | columns
    return db.transact(fleet.save, run_id, url, known=known, joined=joined, **values)


def long_ago(db: Database, run_id: str) -> None:
    """The rows that exist now were changed and seen before any read's overlap."""
    with db.write() as conn:
        mine = engines.c.run_id == run_id
        conn.execute(update(engines).where(mine).values(changed_at=1.0, last_seen_at=engines.c.last_seen_at - 60))


def test_an_engine_joins_once_and_renews_its_lease(db, run_id):
    first = db.transact(fleet.join, run_id, URL, 10.0, "r")
    assert db.transact(fleet.join, run_id, URL, 60.0, "r") > first
    (member,) = read(db, run_id).members
    assert (member.url, member.joined, member.draining, member.state) == (URL, True, False, "dead")
    assert recorded(db, run_id, "engine_joined") == [{"url": URL}]


def test_an_engine_that_has_left_is_absent_and_is_not_seen_again(db, run_id):
    db.transact(fleet.join, run_id, URL, 10.0, "r")
    assert db.transact(fleet.leave, run_id, URL, "r")
    assert not db.transact(fleet.leave, run_id, URL, "r")
    assert saw(db, run_id, 9) == (False, None)  # by a replica that has not read the fleet since
    assert urls(db, run_id) == []
    assert recorded(db, run_id, "engine_left") == [{"url": URL, "why": "asked to"}]


def test_an_engine_of_the_runs_start_cannot_leave(db, run_id):
    saw(db, run_id, 0, joined=False)
    assert not db.transact(fleet.leave, run_id, URL, "r")
    (member,) = read(db, run_id).members
    assert not member.joined


@pytest.mark.parametrize(
    ("lease_s", "state", "checked", "stays"),
    [(-1, "dead", True, False), (-1, "dead", False, True), (-1, "serving", True, True), (60, "dead", True, True)],
)
def test_only_an_engine_that_has_been_dead_for_a_while_and_whose_lease_is_over_is_dropped(
    db, run_id, lease_s, state, checked, stays
):
    db.transact(fleet.join, run_id, URL, lease_s, "r")
    saw(db, run_id, 1, state)
    if checked:
        long_ago(db, run_id)
    db.transact(fleet.drop_lost, run_id, "r")
    assert urls(db, run_id) == [URL] * stays
    assert recorded(db, run_id, "engine_left") == [{"url": URL, "why": "its lease ended"}] * (not stays)


def test_a_run_has_a_bounded_number_of_engines(db, run_id, monkeypatch):
    monkeypatch.setattr(fleet, "MAX_ENGINES", 1)
    db.transact(fleet.join, run_id, URL, 10.0, "r")
    with pytest.raises(RequestError, match="has 1 engines already") as caught:
        db.transact(fleet.join, run_id, "http://127.0.0.1:30001", 10.0, "r")
    assert caught.value.status == 409
    db.transact(fleet.join, run_id, URL, 10.0, "r")  # renewing is not joining


def test_a_replica_overwrites_only_the_state_that_it_had_read(db, run_id):
    recorded_, first = saw(db, run_id, 0, joined=False)
    assert (recorded_, first.changes, first.seen_by) == (True, 1, "r")
    late, row = saw(db, run_id, 0, "updating", joined=False, replica="slow")  # it looked before there was a row
    assert (late, row) == (False, first)
    _, again = saw(db, run_id, 1, "dead", joined=False, replica="s", error="x" * 10)
    assert (again.state, again.changes, again.seen_by, again.error) == ("dead", 2, "s", "x" * 10)
    recorded_, older = saw(db, run_id, 2, joined=False, version=0)  # restarted, or rolled back
    assert (recorded_, older.state, older.version) == (True, "serving", 0)


def test_a_read_returns_what_changed_and_all_when_engines_have_left(db, run_id):
    for n in range(10):
        saw(db, run_id, 0, url=f"{URL}{n}", joined=False)
    db.transact(fleet.join, run_id, URL, 60.0, "r")
    long_ago(db, run_id)
    first = read(db, run_id)
    assert (first.whole, len(first.members), first.version) == (True, 11, 0)
    assert abs(first.at - time.time()) < 60
    db.transact(fleet.join, run_id, URL, 60.0, "r")  # the renewal of a lease is no news
    nothing = read(db, run_id, first)
    assert (nothing.whole, nothing.members) == (False, [])
    saw(db, run_id, 1, "dead", url=f"{URL}3", joined=False)
    db.transact(engine_claims.set_draining, run_id, f"{URL}4", True, "r")
    changed = {member.url: (member.state, member.draining) for member in read(db, run_id, nothing).members}
    assert changed == {f"{URL}3": ("dead", False), f"{URL}4": ("serving", True)}
    db.transact(fleet.leave, run_id, URL, "r")
    left = read(db, run_id, nothing)
    assert (left.whole, len(left.members)) == (True, 10)


def test_a_read_names_the_proxies_that_were_heard(db, run_id):
    db.transact(heartbeats.beat, run_id, "proxy", "a", {"host": "h"})
    db.transact(heartbeats.beat, run_id, "proxy", "b")
    db.transact(heartbeats.beat, run_id, "worker", "w", {"host": "h"})
    found = read(db, run_id).replicas
    assert {name: about for name, (_, about) in found.items()} == {"a": {"host": "h"}, "b": {}}
    assert db.query(fleet.news, run_id, None, -60.0).replicas == {}


def test_an_engine_with_a_key_of_its_own_says_so(db, run_id):
    db.transact(fleet.join, run_id, URL, 60.0, "r", own_key=True)
    assert read(db, run_id).members[0].own_key
    long_ago(db, run_id)
    since = read(db, run_id)
    db.transact(fleet.join, run_id, URL, 60.0, "r", own_key=False)
    assert [member.own_key for member in read(db, run_id, since).members] == [False]
    with db.read() as conn:
        assert conn.scalars(select(engines.c.changes)).one() == 2


def test_an_engine_says_its_backend_when_it_joins_and_a_replica_says_that_of_others(db, run_id):
    db.transact(fleet.join, run_id, URL, 60.0, "r", backend="vllm")
    saw(db, run_id, 1, backend="vllm")
    saw(db, run_id, 0, url=f"{URL}1", joined=False, backend="sglang")
    saw(db, run_id, 0, url=f"{URL}2", joined=False)
    found = read(db, run_id)
    assert {m.url: m.backend for m in found.members} == {URL: "vllm", f"{URL}1": "sglang", f"{URL}2": None}
    long_ago(db, run_id)
    db.transact(fleet.join, run_id, URL, 60.0, "r", backend="sglang")  # another server, at its address
    (joined,) = read(db, run_id, found).members
    assert (joined.backend, joined.state, joined.version) == ("sglang", "dead", None)
