"""Writes many rows at once: COPY on PostgreSQL, one prepared INSERT on SQLite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, event, text

from agentrl.domain.schemas import Json
from agentrl.store import Database
from agentrl.store.db import bulk, faults

_SQLITE = ("PRAGMA foreign_keys=OFF", "PRAGMA synchronous=OFF", "PRAGMA cache_size=-200000")
_POSTGRESQL = ("SET session_replication_role = replica", "SET synchronous_commit = off")  # no checks of foreign keys
_INSERTS: dict[str, bulk.Statement] = {}


@contextmanager
def unchecked(database: Database) -> Iterator[None]:
    """Until the block ends, new connections check no foreign keys and do not wait for the disk. Then the planner's
    statistics are computed.
    """

    def hurry(connection: Any, _record: Any) -> None:
        for statement in _SQLITE if database.is_sqlite else _POSTGRESQL:
            connection.cursor().execute(statement)
        if not database.is_sqlite:
            connection.commit()

    database.engine.dispose()
    event.listen(database.engine, "connect", hurry)
    try:
        yield
    finally:
        event.remove(database.engine, "connect", hurry)
        database.engine.dispose()
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("ANALYZE" if database.is_sqlite else "VACUUM ANALYZE"))


def write(conn: Connection, table: Table, rows: Sequence[Json]) -> None:
    """Insert rows that have every column of the table; JSON as text."""
    if not rows:
        return
    if conn.dialect.name == "sqlite":
        if table.name not in _INSERTS:
            _INSERTS[table.name] = bulk.insert(table)
        bulk.run(conn, _INSERTS[table.name], rows)
        return
    names = [column.name for column in table.columns]
    quoted = ", ".join(f'"{name}"' for name in names)
    values = itemgetter(*names)
    copying = f"COPY {table.name} ({quoted}) FROM STDIN"
    with faults.of_driver(conn, copying) as cursor, cursor.copy(copying) as copy:
        for row in rows:
            copy.write_row(values(row))
