"""Rewards are facts: append-only, superseding, idempotent."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from play import Clock, begin, begin_call, call, end, group, open_group, take

from agentrl.domain.schemas import InteractionStatus, SessionStatus
from agentrl.errors import RequestError
from agentrl.store.audit import run_audit
from agentrl.store.calls import running_calls
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import session_rewards
from agentrl.store.training import returns, rewards


@pytest.fixture
def session_id(db, run_id, limits) -> str:
    with db.write() as conn:
        return group_starts.start_group(conn, run_id, limits, ["a", "b"]).session_ids[0]


def test_a_later_value_supersedes_and_history_stays(db, session_id):
    with db.write() as conn:
        rewards.add(conn, session_id, value=0.2, discount=1.0)
        rewards.add(conn, session_id, value=0.9, discount=1.0)
        rewards.add(conn, session_id, value=0.5, name="style", discount=1.0)
        assert returns.applied(conn, [session_id])[session_id].session == pytest.approx(1.4)
        assert [r["value"] for r in rewards.history(conn, session_id)] == [0.2, 0.9, 0.5]


def test_a_repeated_key_gets_the_first_answer(db, session_id):
    with db.write() as conn:
        first = rewards.add(conn, session_id, value=0.2, discount=1.0, idempotency_key="k")
        assert rewards.add(conn, session_id, value=0.7, discount=1.0, idempotency_key="k") == first
        assert returns.applied(conn, [session_id])[session_id].session == 0.2


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.7e308, -1.0001e6])
def test_values_must_be_finite_and_within_the_bound(db, session_id, limits, value):
    with (
        pytest.raises(RequestError, match=r"of at most ±1e\+06 \(proxy.max_reward\)"),
        db.write() as conn,
    ):
        session_rewards.reward(conn, session_id, limits, value=value)
    with db.read() as conn:
        assert rewards.history(conn, session_id) == []


def test_a_run_chooses_the_bound_of_its_rewards(db, session_id, limits):
    wide, narrow = replace(limits, max_reward=1e9), replace(limits, max_reward=1.0)
    with db.write() as conn:
        session_rewards.reward(conn, session_id, wide, value=-1e9)
        with pytest.raises(RequestError, match="±1 "):
            session_rewards.reward(conn, session_id, narrow, value=1.1)
        session_rewards.reward(conn, session_id, narrow, value=1.0)


def test_unknown_sessions_are_404(db):
    with pytest.raises(RequestError) as caught, db.write() as conn:
        rewards.add(conn, "nobody", value=1.0, discount=1.0)
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("scope", "of_call", "wrong"),
    [
        ("sesion", False, "did you mean 'session'"),
        ("session", True, "takes no interaction_id"),
        ("call", False, "needs an interaction_id"),
        ("branch", False, "needs an interaction_id"),
    ],
)
def test_a_scope_must_exist_and_fit(db, run_id, session_id, scope, of_call, wrong):
    with db.write() as conn:
        call_id = call(conn, run_id, session_id)
    with pytest.raises(RequestError, match=wrong) as refused, db.write() as conn:
        rewards.add(conn, session_id, value=1.0, discount=1.0, scope=scope, interaction_id=call_id if of_call else None)
    assert (refused.value.status, refused.value.param) == (422, "scope")


def test_the_call_must_be_of_the_session(db, run_id, session_id, limits):
    other = open_group(db, run_id, limits)
    with db.write() as conn:
        call_id = call(conn, run_id, other.session_ids[0])
    with pytest.raises(RequestError, match="has no call") as refused, db.write() as conn:
        rewards.add(conn, session_id, value=1.0, discount=1.0, interaction_id=call_id)
    assert refused.value.status == 404


def test_concurrent_rewards_with_one_key_are_stored_once(db, session_id):
    def add(_):
        return db.transact(rewards.add, session_id, value=0.5, discount=1.0, idempotency_key="k")

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(add, range(8)))
    assert len(answers) == 1
    with db.read() as conn:
        assert len(rewards.history(conn, session_id)) == 1


def test_a_late_reward_counts_until_the_lease(db, run_id, limits, monkeypatch):
    """The group is ready without it; once leased, rewards are kept, and change nothing."""
    clock = Clock()
    clock.install(monkeypatch)
    first = group(db, run_id, limits)
    group(db, run_id, limits)
    clock.now += 7 * 3600
    with db.write() as conn:
        assert rewards.add(conn, first.session_ids[0], value=5.0, discount=1.0).applied
    batch = take(db, run_id, begin(db, run_id), 1)
    assert next(t for t in batch.trajectories if t.session_id == first.session_ids[0]).episode_return == 5.0
    with db.write() as conn:
        assert not rewards.add(conn, first.session_ids[0], value=9.0, discount=1.0).applied
        assert [r["applied"] for r in rewards.history(conn, first.session_ids[0])] == [True, True, False]
        assert list(run_audit.scan(conn, run_id)) == []


def test_the_later_reward_supersedes_despite_clock_skew(db, session_id, monkeypatch):
    """A correction through a process whose clock is behind is still the newer fact."""
    db.transact(rewards.add, session_id, value=0.2, discount=1.0)
    behind = time.time() - 3600
    monkeypatch.setattr(codec, "_last_id", 0)
    monkeypatch.setattr(codec, "time", SimpleNamespace(time=lambda: behind))
    db.transact(rewards.add, session_id, value=0.9, discount=1.0)
    assert db.query(returns.applied, [session_id])[session_id].session == 0.9
    assert [r["value"] for r in db.query(rewards.history, session_id)] == [0.2, 0.9]


@pytest.mark.parametrize("status", [InteractionStatus.ABORTED, InteractionStatus.FAILED])
def test_a_call_that_was_not_delivered_cannot_be_rewarded(db, run_id, session_id, status):
    with db.write() as conn:
        call_id = begin_call(conn, run_id, session_id)
        running_calls.fail(conn, call_id, status, "boom")
    with pytest.raises(RequestError, match=f"is {status}") as caught:
        db.transact(rewards.add, session_id, value=1.0, discount=1.0, interaction_id=call_id)
    assert (caught.value.status, caught.value.param) == (409, "interaction_id")


def test_a_reward_of_a_failed_session_is_kept_but_not_applied(db, session_id, limits):
    end(db, session_id, limits, SessionStatus.FAILED)
    assert not db.transact(rewards.add, session_id, value=1.0, discount=1.0).applied
    assert [r["value"] for r in db.query(rewards.history, session_id)] == [1.0]
