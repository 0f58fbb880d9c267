"""Reads SQLite databases with queries that a model wrote: they can change nothing, and are bounded in time and size."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

MAX_STEPS = 20_000_000
"""Instructions of SQLite's virtual machine that a query may take: seconds."""
STEPS_AT_ONCE = 100_000
MAX_ROWS = 10_000
MAX_VALUE_BYTES = 1_000_000
MAX_QUERY_BYTES = 20_000
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
Row = tuple[Any, ...]


class SqlError(ValueError):
    """A query is not valid, not allowed or too expensive."""


def read(database: Path, query: str) -> tuple[list[str], list[Row]]:
    """The names of the columns, and the rows. Raises SqlError."""
    with _opened(database) as connection:
        try:
            cursor = connection.execute(query)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
            if "interrupted" in str(error):
                raise SqlError("the query takes too long") from None
            raise SqlError(str(error)) from None
        if len(rows) > MAX_ROWS:
            raise SqlError(f"the result has more than {MAX_ROWS:,} rows")
        return [name for name, *_ in cursor.description or ()], rows


def schema(database: Path) -> str:
    """The CREATE statements of a database's tables."""
    with _opened(database) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
    return "\n".join(statement for (statement,) in found)


def same_rows(first: Sequence[Row], second: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results have equal rows, in the same order if `ordered`. Numbers are compared to six digits."""
    ours, theirs = [_rounded(row) for row in first], [_rounded(row) for row in second]
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


def table(columns: Sequence[str], rows: Sequence[Row], most: int = 20) -> str:
    """Rows as text, one a line."""
    lines = [" | ".join(columns), *(" | ".join(map(str, row)) for row in rows[:most])]
    return "\n".join(lines + [f"({len(rows)} rows)"] * (len(rows) > most))


@contextmanager
def _opened(database: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_QUERY_BYTES)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
        left = iter(range(MAX_STEPS // STEPS_AT_ONCE))
        connection.set_progress_handler(lambda: next(left, None) is None, STEPS_AT_ONCE)
        yield connection


def _rounded(row: Row) -> Row:
    return tuple(float(f"{value:.6g}") if isinstance(value, int | float) else value for value in row)
