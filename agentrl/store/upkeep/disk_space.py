"""Gives the space of removed rows back to the file system or to the database."""

from __future__ import annotations

import sqlite3

from sqlalchemy import (
    text,
)

from agentrl.errors import StoreError
from agentrl.store.db import faults
from agentrl.store.db.database import Database
from agentrl.store.tables import (
    metadata,
)


def vacuum(database: Database) -> None:
    """Free the space of removed rows: SQLite rewrites its file, PostgreSQL marks the space as reusable.

    SQLite's writers wait meanwhile, and it needs as much free disk space as the database has. Raises StoreError when it
    is not possible now.
    """
    with database.connect(writing=False) as conn, faults.reported(database.where):
        if not database.is_sqlite:
            conn.execution_options(isolation_level="AUTOCOMMIT")
            conn.execute(text(f"VACUUM (ANALYZE) {', '.join(metadata.tables)}"))
            return
        raw = conn.connection.driver_connection
        assert raw is not None
        try:
            raw.execute("VACUUM")
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise StoreError(f"{database.where}: cannot be vacuumed now: {error}") from error
