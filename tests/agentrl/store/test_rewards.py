"""Rewards are facts: append-only, superseding, idempotent."""

import math

import pytest

from agentrl.errors import RequestError
from agentrl.store import returns, rewards, sessions


@pytest.fixture
def session_id(db, run_id, limits) -> str:
    with db.write() as conn:
        return sessions.start_group(conn, run_id, limits, ["a", "b"]).session_ids[0]


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_must_be_finite(db, session_id, value):
    with pytest.raises(RequestError, match="finite"), db.write() as conn:
        rewards.add(conn, session_id, value=value, discount=1.0)


def test_unknown_sessions_are_404(db):
    with pytest.raises(RequestError) as caught, db.write() as conn:
        rewards.add(conn, "nobody", value=1.0, discount=1.0)
    assert caught.value.status == 404
