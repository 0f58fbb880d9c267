"""INSERT with ON CONFLICT, for either database."""

from __future__ import annotations

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert(conn: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that supports ON CONFLICT."""
    return sqlite.insert(table) if conn.dialect.name == "sqlite" else postgresql.insert(table)
