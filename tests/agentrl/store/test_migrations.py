"""The migrations build exactly what tables.py says, step by step in both directions, and once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Inspector, inspect, make_url, text

from agentrl.store import Database
from agentrl.store.db import sqlite_file
from agentrl.store.tables import metadata

from .oldest_rows import NEWEST, OLDEST, REVISIONS


def schema(conn: Connection) -> dict[str, Any]:
    """Everything that the database tells about its tables; no order of columns, which ALTER TABLE cannot keep."""
    inspector = inspect(conn)
    told: dict[str, Any] = {f"view {name}": inspector.get_view_definition(name) for name in inspector.get_view_names()}
    columns, primary_keys = inspector.get_multi_columns(), inspector.get_multi_pk_constraint()
    foreign, unique = inspector.get_multi_foreign_keys(), inspector.get_multi_unique_constraints()
    checks, indexes = inspector.get_multi_check_constraints(), inspector.get_multi_indexes()
    for table in columns:  # (schema, name)
        told[table[1]] = {
            "columns": {c["name"]: (repr(c["type"]), c["nullable"]) for c in columns[table]},
            "primary key": primary_keys[table],
            "foreign keys": foreign_keys(inspector, foreign[table]),
            "unique": by_name(unique[table]),
            "checks": by_name(checks[table]),
            "indexes": by_name(indexes[table]),
        }
    return told


def foreign_keys(inspector: Inspector, keys: list[Any]) -> list[dict[str, Any]]:
    """By column: SQLAlchemy reads no names of those that SQLite's ALTER TABLE adds."""
    named = inspector.bind.dialect.name != "sqlite"
    found = [{**key, "name": key["name"] if named else None} for key in keys]
    return sorted(found, key=lambda key: key["constrained_columns"])


def by_name(items: list[Any]) -> list[dict[str, Any]]:
    predicates = [{k: str(v) for k, v in item.get("dialect_options", {}).items()} for item in items]
    plain = [{**item, "dialect_options": options} for item, options in zip(items, predicates, strict=True)]
    return sorted(plain, key=lambda item: str(item["name"]))


def tables_of(told: dict[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in told.items() if name != "alembic_version" and not name.startswith("view ")}


def test_autogenerate_finds_no_difference(db: Database):
    with db.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


def test_the_migrated_schema_is_the_declared_one(db: Database, databases, database_kind):
    """Autogenerate looks neither at CHECK constraints nor at the predicates of partial indexes."""
    with databases.lent(database_kind, migrated=False) as url:
        declared = Database(url)
        if declared.is_sqlite:
            sqlite_file.create(Path(str(make_url(url).database)))
        with declared.write() as conn:
            metadata.create_all(conn)
        want = declared.query(schema)
        declared.close()
    have = tables_of(db.query(schema))
    assert have.keys() == want.keys()
    for table in want:
        assert have[table] == want[table], table
    assert any(table["checks"] for table in want.values())
    assert any("where" in str(index) for table in want.values() for index in table["indexes"])


def test_the_lineage_view_can_be_queried(db: Database):
    assert db.query(lambda conn: conn.execute(text("SELECT * FROM lineage")).all()) == []


def test_every_revision_upgrades_and_downgrades(empty: Database):
    at: dict[str, dict[str, Any]] = {}
    for revision in REVISIONS:
        empty.upgrade(revision)
        at[revision] = empty.query(schema)
    for revision in REVISIONS[::-1]:
        assert empty.query(schema) == at[revision]
        below = REVISIONS[REVISIONS.index(revision) - 1] if revision != OLDEST else "base"
        empty.downgrade(below)
    assert tables_of(empty.query(schema)) == {}
    assert not [name for name in empty.query(schema) if name.startswith("view ")]
    empty.upgrade()
    assert empty.query(schema) == at[NEWEST]
    empty.require_current()


STARTER = """
import sys
from sqlalchemy import event
from agentrl.store import Database
from agentrl.store.db import sqlite_file
url = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
db = Database(url)
made = []
event.listen(db.engine, "before_cursor_execute", lambda *a: made.append(a[2]) if "CREATE TABLE" in a[2] else None)
db.upgrade()
db.require_current()
print(sum("runs" in statement.split("(")[0] for statement in made), flush=True)
"""


@pytest.mark.long_on("sqlite")
def test_processes_that_start_together_migrate_once(empty_database_url: str):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, empty_database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 6, [error for _, error in told]
    assert sum(int(output) for output, _ in told) == 1
