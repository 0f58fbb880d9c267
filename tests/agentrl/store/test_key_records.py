"""Keys in the store: what each opens, how it ends, and that only hashes are stored."""

from __future__ import annotations

import re
import time

import pytest
from sqlalchemy import select

from agentrl.domain.schemas import Power, SessionStatus
from agentrl.errors import RequestError
from agentrl.store import key_records
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import group_starts, session_lookup
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import keys as table
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.upkeep import retention


def opens(db, run_id, key):
    return db.query(key_records.find, run_id, hash_key(key))


def valid(db, run_id, key):
    found = opens(db, run_id, key)
    return found is not None and found.ends_at > time.time()


@pytest.fixture
def session_id(db, run_id, limits):
    return db.transact(group_starts.start_group, run_id, limits, [hash_key("s0"), hash_key("s1")]).session_ids[0]


def test_a_key_shows_its_power_and_only_its_hash_is_stored(db, run_id):
    made = db.transact(key_records.create, run_id, Power.ADMIN, "ops")
    assert re.fullmatch(r"arl-admin-[A-Za-z0-9_-]{32}", made.key)
    assert opens(db, run_id, made.key) == key_records.Key(Power.ADMIN)
    with db.read() as conn:
        (row,) = conn.execute(select(table)).all()
    assert row.key_hash == hash_key(made.key)
    assert made.key not in str(row)
    assert [(k["name"], k["power"], k["state"]) for k in db.query(key_records.listing, run_id)] == [
        ("first", "run", "valid"),
        ("ops", "admin", "valid"),
    ]
    assert not any("hash" in name for row in db.query(key_records.listing, run_id) for name in row)


def test_several_keys_of_one_power_live_and_end_apart(db, run_id):
    one, two = (db.transact(key_records.create, run_id, Power.RUN, name) for name in ("ci", "laptop"))
    db.transact(key_records.revoke, run_id, "ci")
    assert opens(db, run_id, one.key).revoked
    assert not valid(db, run_id, one.key)
    assert valid(db, run_id, two.key)
    assert valid(db, run_id, "run-key")
    before = db.query(key_records.listing, run_id)
    assert db.transact(key_records.revoke, run_id, one.id) == one.id
    assert db.query(key_records.listing, run_id) == before, "revoking twice changes nothing"


def test_the_first_key_of_a_run_is_revoked_and_rotated_like_any_other(db, run_id):
    made = db.transact(key_records.rotate, run_id, "first", overlap_s=60)
    assert (made.power, made.name) == (Power.RUN, "first")
    assert 50 < opens(db, run_id, "run-key").ends_at - time.time() <= 60
    assert valid(db, run_id, made.key)
    old = next(k["id"] for k in db.query(key_records.listing, run_id) if k["id"] != made.id)
    db.transact(key_records.revoke, run_id, old)
    assert not valid(db, run_id, "run-key")
    assert valid(db, run_id, made.key)


def test_revoking_the_first_key_leaves_a_run_without_it(db, run_id):
    db.transact(key_records.revoke, run_id, "first")
    assert opens(db, run_id, "run-key").revoked
    assert [(k["name"], k["state"]) for k in db.query(key_records.listing, run_id)] == [("first", "revoked")]
    assert db.query(key_records.admin_and_run_keys, run_id)[hash_key("run-key")].revoked


def test_a_rotation_without_an_overlap_leaves_the_old_key_until_it_is_revoked(db, run_id):
    old = db.transact(key_records.create, run_id, Power.RUN, "ci")
    new = db.transact(key_records.rotate, run_id, "ci")
    assert valid(db, run_id, old.key)
    with pytest.raises(RequestError, match="several keys are called 'ci'"):
        db.transact(key_records.revoke, run_id, "ci")
    db.transact(key_records.revoke, run_id, old.id)
    assert db.transact(key_records.revoke, run_id, "ci") == new.id


def test_a_rotation_never_extends_an_expiry(db, run_id):
    old = db.transact(key_records.create, run_id, Power.RUN, "ci", time.time() + 5)
    db.transact(key_records.rotate, run_id, old.id, overlap_s=3600)
    assert opens(db, run_id, old.key).ends_at < time.time() + 6


def test_an_ended_key_is_not_rotated(db, run_id):
    made = db.transact(key_records.create, run_id, Power.RUN, "ci")
    db.transact(key_records.revoke, run_id, made.id)
    with pytest.raises(RequestError, match="is revoked") as refused:
        db.transact(key_records.rotate, run_id, made.id)
    assert refused.value.status == 409
    with pytest.raises(RequestError) as unknown:
        db.transact(key_records.rotate, run_id, "nobody")
    assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("power", "name", "expires_at"),
    [
        (Power.SESSION, "x", None),
        (Power.RUN, "", None),
        (Power.RUN, "x" * 101, None),
        (Power.RUN, "a\nb", None),
        (Power.RUN, "x", 1.0),
        (Power.RUN, "x", float("inf")),
        (Power.RUN, "x", float("nan")),
    ],
)
def test_invalid_key_parameters_are_refused_by_name(db, run_id, power, name, expires_at):
    with pytest.raises(RequestError) as refused:
        db.transact(key_records.create, run_id, power, name, expires_at)
    assert refused.value.status == 422
    assert refused.value.param in ("power", "name", "expires_at")


def test_a_session_gets_another_key_and_every_older_one_ends(db, run_id, session_id):
    first = db.transact(key_records.rotate_session, run_id, session_id, overlap_s=60)
    assert first.key.startswith("arl-session-")
    assert opens(db, run_id, first.key) == key_records.Key(Power.SESSION, session_id)
    assert valid(db, run_id, "s0")
    second = db.transact(key_records.rotate_session, run_id, session_id)
    assert not valid(db, run_id, "s0")
    assert not valid(db, run_id, first.key)
    assert valid(db, run_id, second.key)
    assert valid(db, run_id, "s1"), "the group's other session is not touched"
    changed = db.query(key_records.changed_of_sessions, run_id, time.time())
    assert set(changed) == {hash_key(k) for k in ("s0", first.key, second.key)}
    assert db.query(key_records.changed_of_sessions, run_id, time.time() + key_records.SKEW_S + 60) == {}
    assert db.query(key_records.admin_and_run_keys, run_id).keys() == {hash_key("run-key")}


def test_a_sealed_session_gets_no_key(db, run_id, session_id, limits):
    db.transact(sealing.end, session_id, SessionStatus.FAILED, None, limits)
    with pytest.raises(RequestError) as refused:
        db.transact(key_records.rotate_session, run_id, session_id)
    assert (refused.value.status, refused.value.code) == (409, "session_sealed")


def test_a_key_opens_nothing_in_another_run(db, run_id):
    from agentrl.store import runs

    other = db.transact(
        runs.create, name="other", config={}, task_data=[{}], base_model="tiny", key="other-key", seed=0, steps=1
    )
    made = db.transact(key_records.create, run_id, Power.ADMIN, "ops")
    assert opens(db, other, made.key) is None
    assert opens(db, other, "run-key") is None
    assert opens(db, other, "other-key") == key_records.Key(Power.RUN)


def test_keys_of_sessions_go_with_them(db, run_id, session_id, limits):
    db.transact(key_records.rotate_session, run_id, session_id)
    db.transact(key_records.create, run_id, Power.RUN, "ci")
    group = db.query(session_lookup.get, session_id).group_id
    for sid in db.query(lambda conn: list(conn.execute(select(sessions_table.c.id)).scalars())):
        db.transact(sealing.end, sid, SessionStatus.ABANDONED, None, limits)
    pruned = retention.prune(db, run_id, time.time() + 60)
    assert pruned.rows["groups"] == 1, group
    assert pruned.rows["keys"] == 2
    assert [k["name"] for k in db.query(key_records.listing, run_id)] == ["first", "ci"]
    assert db.integrity() == []
