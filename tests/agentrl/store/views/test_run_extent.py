"""The ids of a run's rows are between the bounds, and those of a later run are not."""

from __future__ import annotations

import pytest
from history import History
from sqlalchemy import func, select, update

from agentrl.store import Database, heartbeats
from agentrl.store.tables import heartbeats as heartbeat_rows
from agentrl.store.tables import interactions, sessions
from agentrl.store.views import recent_faults, run_extent


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=3)
    made.train(1)
    return made


@pytest.mark.parametrize("beats", [False, True])
def test_every_session_and_call_is_within(history: History, beats: bool) -> None:
    with history.db.write() as conn:
        if beats:
            heartbeats.beat(conn, history.run_id, "proxy", "p")
        first, end = run_extent.of_run(conn, history.run_id)
        for table in (sessions, interactions):
            low, high = conn.execute(select(func.min(table.c.id), func.max(table.c.id))).one()
            assert first < low <= high < end


def test_a_run_that_ended_hours_ago_ends_before_a_later_one(history: History) -> None:
    later = History(history.db, name="later", seed=4)
    later.train(1)
    with history.db.write() as conn:
        heartbeats.beat(conn, history.run_id, "proxy", "p")
        conn.execute(update(heartbeat_rows).values(last_seen_at=heartbeat_rows.c.last_seen_at - 10_000))
        _, end = run_extent.of_run(conn, history.run_id)
        newer = select(func.min(sessions.c.id)).where(sessions.c.run_id == later.run_id)
        assert end < conn.execute(newer).scalar_one()
        assert run_extent.of_run(conn, later.run_id)[1] == run_extent.LAST


def test_faults_are_those_of_the_run(history: History) -> None:
    later = History(history.db, name="later", seed=4)
    later.rejected()
    with history.db.write() as conn:
        assert recent_faults.of_run(conn, history.run_id)["sessions"]["failed"] == 0
        assert recent_faults.of_run(conn, later.run_id)["sessions"]["failed"] == 2
