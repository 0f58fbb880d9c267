"""Checks of due sessions: a call begun meanwhile, and large trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from concurrent_writes import meanwhile
from databases import KINDS
from play import begin_call, open_group
from session_trees import counted, old_tree, sweep_to_the_end
from sqlalchemy import func, select

from agentrl.domain.schemas import SessionStatus
from agentrl.store.sessions import (
    due_times,
    session_lookup,
)
from agentrl.store.sessions.ends import liveness
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import returns, rewards


def test_a_call_begun_during_a_check_keeps_its_session_open(db, run_id, limits):
    """Whoever decides that a session is silent waits for the intents that are about to be committed."""
    session_id = open_group(db, run_id, limits).session_ids[0]
    impatient = replace(limits, session_timeout_s=0.0)

    def look(conn):
        return liveness.check_due_session(conn, session_id, impatient, heard_since=0.0)

    db.transact(due_times.check_at, session_id, 0.0)  # due
    _, abandoned = meanwhile(db, lambda conn: begin_call(conn, run_id, session_id), look)
    assert not abandoned
    with db.read() as conn:
        assert session_lookup.get(conn, session_id).status == SessionStatus.OPEN


@pytest.mark.parametrize(("shape", "n"), [("deep", 1050), pytest.param("wide", 300, marks=pytest.mark.long)])
@pytest.mark.parametrize("database_kind", KINDS[:1])
def test_a_tree_of_an_older_version_is_swept_without_recursion_and_in_small_transactions(db, run_id, limits, shape, n):
    ids = old_tree(db, run_id, limits, [i if shape == "deep" else 0 for i in range(n)])
    with db.write() as conn:
        conn.execute(sessions_table.update().values(created_at=0.0, due_at=0.0))
        rewards.add(conn, ids[0], value=1.0, discount=1.0)
    with counted(db) as seen:
        sweep_to_the_end(db, run_id, limits, seen)
    with db.read() as conn:
        built = select(sessions_table.c.status, func.count()).where(sessions_table.c.built).group_by("status")
        assert [tuple(row) for row in conn.execute(built)] == [("failed", n + 1)]
        assert returns.of_sessions(conn, ids[-1:], 1.0)[ids[-1]].episode_return == 0.0
