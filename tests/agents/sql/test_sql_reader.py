"""Queries that a model wrote can read a database, and nothing else, within bounds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.sql import sql_reader
from agentrl.agents.sql.sql_reader import SqlError, read, same_rows, schema, table


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "some data?.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(1, "x"), (2, "y"), (2, None)])
    return path


def test_rows_have_names_and_values(database: Path) -> None:
    assert read(database, "SELECT a, count(*) AS n FROM t GROUP BY a") == (["a", "n"], [(1, 1), (2, 2)])
    assert read(database, "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 3) SELECT n FROM c")[1]
    assert schema(database) == "CREATE TABLE t (a INTEGER, b TEXT)"


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO t VALUES (3, 'z')",
        "DROP TABLE t",
        "CREATE TEMP TABLE u (a)",
        "ATTACH '/tmp/other.sqlite' AS other",
        "PRAGMA writable_schema = 1",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "SELECT nothing FROM t",
        "SELECT '\0'; DROP TABLE t",
        "no SQL \ud800",
        "SELECT '" + "x" * sql_reader.MAX_QUERY_BYTES + "'",
        "SELECT zeroblob(1000000000)",
    ],
)
def test_a_query_that_does_anything_else_is_refused(database: Path, query: str) -> None:
    before = database.read_bytes()
    with pytest.raises(SqlError):
        read(database, query)
    assert database.read_bytes() == before


def test_an_empty_query_has_no_rows(database: Path) -> None:
    assert read(database, " -- nothing") == ([], [])


def test_an_endless_query_ends(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_reader, "MAX_STEPS", 1_000_000)
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    with pytest.raises(SqlError, match="takes too long"):
        read(database, endless)


def test_a_long_result_is_refused(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_reader, "MAX_ROWS", 2)
    with pytest.raises(SqlError, match="more than 2 rows"):
        read(database, "SELECT * FROM t")


@pytest.mark.parametrize(
    ("first", "second", "ordered", "same"),
    [
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], False, True),
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], True, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1,)], [(1.0000000001,)], True, True),
        ([(1,)], [("1",)], False, False),
        ([(None, b"x")], [(None, b"x")], False, True),
        ([], [], True, True),
    ],
)
def test_results_are_compared_by_their_rows(first: Any, second: Any, ordered: bool, same: bool) -> None:
    assert same_rows(first, second, ordered=ordered) == same


def test_a_long_table_is_cut() -> None:
    assert table(["n"], [(1,), (2,), (3,)], most=2) == "n\n1\n2\n(3 rows)"
