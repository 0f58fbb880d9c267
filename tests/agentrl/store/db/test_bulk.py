"""Errors of statements run by the driver become the errors that SQLAlchemy raises."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select, text

from agentrl.errors import StoreError
from agentrl.store import Database
from agentrl.store.db import bulk
from agentrl.store.tables import contents, sessions

INSERT = bulk.insert(contents)
SELECT = bulk.select(sessions, "id", where="status = 'open'", lock="SHARE")
ROWS = [{"hash": f"{i}", "body": b"\0"} for i in range(3)]


def hashes(conn: Connection) -> list[str]:
    return sorted(conn.execute(select(contents.c.hash)).scalars())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_are_written_and_counted(db: Database, count: int):
    assert db.transact(bulk.run, INSERT, ROWS[:count]) == count
    assert db.query(hashes) == [row["hash"] for row in ROWS[:count]]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[:2]])
def test_a_row_that_is_refused_is_a_store_error_and_nothing_is_stored(db: Database, rows):
    db.transact(bulk.run, INSERT, rows[-1:])
    with pytest.raises(StoreError, match=r"(?i)unique"):
        db.transact(bulk.run, INSERT, rows)
    assert db.query(hashes) == [rows[-1]["hash"]]


def test_a_connection_lost_under_a_statement_is_replaced(databases):
    with databases.lent("postgresql") as url:
        db, tries = Database(url), []

        def unit(conn: Connection) -> list[str]:
            tries.append(conn.scalar(text("SELECT pg_backend_pid()")))
            if len(tries) == 1:
                db.query(lambda other: other.execute(text(f"SELECT pg_terminate_backend({tries[0]}, 10000)")))
            return [row[0] for row in bulk.fetch(conn, SELECT, ["unknown"])]

        assert db.transact(unit) == []
        assert len(set(tries)) == 2
        db.close()
