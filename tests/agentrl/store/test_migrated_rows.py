"""Rows survive migrations in both directions, and get the values of new columns."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, inspect, text

from agentrl.store import Database

from .oldest_rows import ID, OLDEST, REVISIONS, ROWS, fill, kept, reflect


@pytest.mark.long_on("postgresql")  # SQLite copies tables to change them, PostgreSQL does not
def test_rows_of_the_oldest_revision_survive_the_way_up_and_down(empty: Database):
    want = {name: [row] for name, row in ROWS.items()}
    empty.upgrade(OLDEST)
    empty.transact(fill)
    assert set(ROWS) | {"alembic_version"} == set(empty.query(lambda conn: inspect(conn).get_table_names()))
    for revision in REVISIONS[1:]:
        empty.upgrade(revision)
        assert empty.query(kept) == want, revision
        assert empty.integrity() == []
    for revision in REVISIONS[-2::-1]:
        empty.downgrade(revision)
        assert empty.query(kept) == want, revision
        assert empty.integrity() == []


def test_steps_of_the_first_revision_get_the_settings_that_their_batches_were_made_with(empty: Database):
    empty.upgrade("0001")
    empty.transact(fill)
    empty.upgrade("0002")
    (step,) = empty.query(lambda conn: conn.execute(text("SELECT * FROM steps")).all())
    assert (step.max_staleness, step.turn_discount, step.trajectories, step.tokens_trained) == (4, 1.0, 1, 1)


def test_sub_agents_of_the_first_revision_get_their_roots_however_deep_they_stand(empty: Database):
    empty.upgrade("0001")
    empty.transact(fill)
    levels = 1050

    def grow(conn: Connection) -> None:
        sessions = reflect(conn).tables["sessions"]
        ids = [ID["session"], *(f"{i:032d}" for i in range(1, levels + 1))]
        rows = [
            {**ROWS["sessions"], "id": ids[i], "parent_session_id": ids[i - 1], "sample_index": i, "key_hash": ids[i]}
            for i in range(1, levels + 1)
        ]
        conn.execute(sessions.insert(), rows)

    empty.transact(grow)
    empty.upgrade()
    found = empty.query(lambda conn: conn.execute(text("SELECT * FROM sessions ORDER BY depth")).all())
    assert [row.depth for row in found] == list(range(levels + 1))
    assert {row.root_session_id for row in found} == {None, ID["session"]}
    assert found[0].root_session_id is None
    assert [row.parent_session_id for row in found[1:]] == [row.id for row in found[:-1]]
    assert empty.integrity() == []


def test_a_downgrade_rejects_the_groups_that_wait_for_sessions_in_vain(empty: Database):
    """One waits and all of its sessions have ended, one waits and still runs, one has given its places up."""
    empty.upgrade("0020")

    def grow(conn: Connection) -> None:
        tables = reflect(conn).tables
        conn.execute(tables["runs"].insert().values(ROWS["runs"] | {"admitted": 3, "running": 2}))
        group = {"run_id": ID["run"], "size": 4, "is_eval": False, "external": True, "created_at": 1.0}
        for i, (state, due_at, missing) in enumerate([("running", 9.0, 0), ("running", 9.0, 0), ("ready", None, 3)]):
            more = {"id": str(i), "name": str(i), "state": state, "due_at": due_at, "missing": missing}
            conn.execute(tables["groups"].insert().values(group | more))
            session = ROWS["sessions"] | {"id": str(i), "group_id": str(i), "key_hash": str(i), "depth": 0}
            later = {"built": i != 1, "due_at": 9.0, "last_seen_at": 1.0}
            conn.execute(tables["sessions"].insert().values({**session, **later}))

    empty.transact(grow)
    empty.downgrade("0019")
    found = empty.query(lambda conn: conn.execute(text("SELECT * FROM groups ORDER BY id")).all())
    why = "not filled before a downgrade"
    assert [(row.state, row.size, row.reject_reason, row.finished_at) for row in found] == [
        ("rejected", 1, why, 9.0),
        ("running", 1, None, None),
        ("ready", 1, None, None),
    ]
    (run,) = empty.query(lambda conn: conn.execute(text("SELECT * FROM runs")).all())
    assert (run.admitted, run.running, run.returned) == (3, 1, 1)
    assert empty.integrity() == []
