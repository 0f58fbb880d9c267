"""Sealing a session: its sub-agents, and a session that waits for its reward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from concurrent_writes import child_of
from databases import KINDS
from play import call, open_group
from session_trees import child, counted, old_tree
from sqlalchemy import select

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import runs
from agentrl.store.sessions.ends import liveness, sealing, settling
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import rewards


@pytest.mark.long_on("postgresql")
def test_nothing_of_a_failed_session_s_sub_agents_is_trained(db, run_id, limits):
    """Also two levels below, and when they had ended well and were rewarded before."""
    (root, other) = open_group(db, run_id, limits).session_ids
    child = child_of(db, root, limits)
    grandchild = child_of(db, child, limits)
    with db.write() as conn:
        for session_id in (root, child, grandchild):
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
        sealing.end(conn, grandchild, SessionStatus.COMPLETED, None, limits)
        sealing.end(conn, child, SessionStatus.COMPLETED, None, limits)
        sealing.end(conn, root, SessionStatus.FAILED, "boom", limits)
        sealing.end(conn, other, SessionStatus.FAILED, "boom", limits)
    with db.read() as conn:
        assert runs.state_counts(conn, run_id) == {"groups": {"rejected": 1}, "trajectories": {}}


def test_a_session_that_waits_for_its_reward_can_still_be_given_up(db, run_id, limits):
    patient = replace(limits, reward_timeout_s=1000.0)
    first, second = open_group(db, run_id, limits).session_ids
    with db.write() as conn:
        call(conn, run_id, first)
        assert sealing.end(conn, first, SessionStatus.COMPLETED, None, patient) == "completed"
        assert sealing.end(conn, first, SessionStatus.ABANDONED, None, patient) == "abandoned"
        assert not rewards.add(conn, first, value=1.0, discount=1.0).applied
        assert sealing.end(conn, first, SessionStatus.COMPLETED, None, patient) == "abandoned"
        sealing.end(conn, second, SessionStatus.ABANDONED, None, patient)
    with db.read() as conn:
        assert runs.state_counts(conn, run_id) == {"groups": {"rejected": 1}, "trajectories": {}}


@pytest.mark.parametrize("database_kind", KINDS[:1])
def test_the_end_of_a_large_tree_seals_all_of_it_and_settles_a_few(db, run_id, limits):
    ids = old_tree(db, run_id, limits, [0] * 1000)
    with counted(db) as seen:
        assert db.transact(sealing.end, ids[0], SessionStatus.COMPLETED, None, limits) == "completed"
    assert seen.built == settling.MOST_SETTLED
    assert seen.statements < 200
    with db.read() as conn:
        assert set(conn.execute(select(sessions_table.c.status)).scalars()) == {"completed"}
    assert len(db.query(liveness.due, run_id, limit=2000)) == 1001 - settling.MOST_SETTLED
    with pytest.raises(RequestError, match="sealed"):
        child(db, ids[1], limits)
