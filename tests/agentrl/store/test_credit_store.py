"""Late rewards change the returns of trajectories that are not leased yet."""

from __future__ import annotations

import pytest
from play import begin, call, group, open_group, take
from sqlalchemy import select

from agentrl.domain.schemas import SessionStatus
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import trajectories
from agentrl.store.training import rewards


def rows(db, session_id):
    with db.read() as conn:
        return conn.execute(
            select(trajectories).where(trajectories.c.session_id == session_id).order_by(trajectories.c.id)
        ).all()


def test_a_late_reward_makes_a_side_call_trainable_and_the_row_says_so(db, run_id, limits):
    new = open_group(db, run_id, limits)
    with db.write() as conn:
        for session_id in new.session_ids:
            main = call(conn, run_id, session_id, version=1)
            side = call(conn, run_id, session_id, output=(8, 9, 10), version=0, role="side")
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    before = rows(db, session_id)
    assert [(t.leaf_id, t.state, t.reason) for t in before] == [
        (main, "ready", None),
        (side, "rejected", "no_trainable_tokens"),
    ]
    with db.write() as conn:
        rewards.add(conn, session_id, value=0.5, discount=1.0, interaction_id=side)
    after = rows(db, session_id)[1]
    assert (after.state, after.reason, after.trainable_tokens) == ("ready", None, 3)
    assert (after.min_version, after.max_version) == (0, 0)


def test_a_late_reward_of_an_inner_side_call_widens_the_versions_of_its_path(db, run_id, limits):
    new = open_group(db, run_id, limits)
    with db.write() as conn:
        for session_id in new.session_ids:
            side = call(conn, run_id, session_id, version=0, role="side")
            call(conn, run_id, session_id, parent=side, delta=(5,), output=(6,), version=1)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        rewards.add(conn, session_id, value=0.5, discount=1.0, interaction_id=side)
    (path,) = rows(db, session_id)
    assert (path.trainable_tokens, path.min_version, path.max_version) == (3, 0, 1)


@pytest.mark.long_on("postgresql")
def test_a_leased_batch_does_not_change(db, run_id, limits):
    first = group(db, run_id, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    before = rows(db, first.session_ids[0])
    with db.write() as conn:
        assert not rewards.add(conn, first.session_ids[0], value=7.0, discount=1.0).applied
    assert rows(db, first.session_ids[0]) == before
    with db.read() as conn:
        from agentrl.store.training import steps

        assert steps.batch(conn, batch.step_id).digest() == batch.digest()
