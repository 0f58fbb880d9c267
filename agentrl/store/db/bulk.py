"""Runs one statement for many rows by the driver itself: SQL compiled once per dialect, parameters passed as they are.

SQLAlchemy's handling of a statement and of its rows costs more CPU than SQLite's insert. Values must be what both
drivers take: text, bytes, numbers, booleans, None; JSON as text (`codec.json_text`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert, Update

from agentrl.domain.schemas import Json
from agentrl.store.db import faults
from agentrl.store.db.codec import json_text

_SQLITE = sqlite.dialect()
_POSTGRESQL = postgresql.psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]


class Statement:
    """An INSERT or UPDATE as SQL text and the order of its parameters, for either database."""

    def __init__(self, build: Any, columns: Sequence[str]) -> None:
        self._build = build
        self._columns = list(columns)
        self._compiled = cache(self._compile)

    def _compile(self, dialect_name: str) -> tuple[str, list[str]]:
        dialect = _SQLITE if dialect_name == "sqlite" else _POSTGRESQL
        compiled = self._build(dialect_name).compile(dialect=dialect, column_keys=self._columns)
        assert compiled.positiontup is not None
        return str(compiled), list(compiled.positiontup)

    def on(self, dialect_name: str) -> tuple[str, list[str]]:
        """(SQL, parameter names in order)."""
        return self._compiled(dialect_name)


def insert(table: Table, *columns: str) -> Statement:
    """INSERT of these columns (default: all)."""
    return Statement(lambda _: sa.insert(table), columns or [c.name for c in table.columns])


def insert_new(table: Table) -> Statement:
    """INSERT of rows, ignoring those that exist."""

    def build(dialect_name: str) -> Insert:
        chosen: Any = sqlite if dialect_name == "sqlite" else postgresql
        statement: Insert = chosen.insert(table).on_conflict_do_nothing()
        return statement

    return Statement(build, [c.name for c in table.columns])


def update(table: Table, key: str, *columns: str, where: str = "", **computed: Any) -> Statement:
    """UPDATE of columns where column `key` equals the parameter called `key`, and SQL `where` holds.

    `computed` sets columns to SQL expressions.
    """

    def build(_: str) -> Update:
        values: Json = {name: sa.bindparam(name) for name in columns} | computed
        statement = sa.update(table).where(table.c[key] == sa.bindparam("key")).values(values)
        return statement.where(sa.text(where)) if where else statement

    return Statement(build, [])


def run(conn: Connection, statement: Statement, rows: Sequence[Json]) -> int:
    """Execute the statement for every row; returns how many rows of the table were written."""
    if not rows:
        return 0
    sql, names = statement.on(conn.dialect.name)
    values = list(map(itemgetter(*names), rows))
    with faults.of_driver(conn, sql) as cursor:
        if len(values) == 1:  # psycopg would open a pipeline for executemany
            cursor.execute(sql, values[0])
        else:
            cursor.executemany(sql, values)
        return int(cursor.rowcount)


def select(table: Table, *columns: str, where: str, lock: str) -> tuple[str, str]:
    """SQL that reads columns of those rows with given ids for which `where` holds, for `fetch`.

    `lock` is PostgreSQL's (`SHARE`, `NO KEY UPDATE`), taken in the order of the ids.
    """
    head = f"SELECT {', '.join(columns)} FROM {table.name} WHERE {where} AND id "
    return head + "IN (SELECT value FROM json_each(?))", head + f"= ANY(%s) ORDER BY id FOR {lock}"


def fetch(conn: Connection, statement: tuple[str, str], ids: Iterable[str]) -> Sequence[Any]:
    """Run a statement of `select`: the ids are one parameter, however many they are."""
    is_sqlite = conn.dialect.name == "sqlite"
    sql, wanted = (statement[0], json_text(list(ids))) if is_sqlite else (statement[1], list(ids))
    with faults.of_driver(conn, sql) as cursor:
        rows: Sequence[Any] = cursor.execute(sql, (wanted,)).fetchall()
    return rows
