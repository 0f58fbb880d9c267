"""tests/databases.py: what a test does to its PostgreSQL database must not reach the next test."""

from __future__ import annotations

from collections.abc import Iterator

import postgres
import psycopg
import pytest
from databases import Databases


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Databases of this module's own. Its tests follow each other: each borrows what the one before returned."""
    made = Databases(tmp_path_factory.mktemp("lent"))
    yield made
    made.close()


def rows(url: str) -> int:
    with postgres.connect(url) as conn:
        found = conn.execute("SELECT count(*) FROM contents").fetchone()
    assert found is not None
    return int(found[0])


def insert(conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO contents VALUES ('1', '{}')")


def test_the_rows_of_one_test_are_gone_for_the_next(lender: Databases) -> None:
    with lender.lent("postgresql") as first, postgres.connect(first) as conn:
        insert(conn)
        assert rows(first) == 1
    with lender.lent("postgresql") as second:
        assert rows(second) == 0


def test_a_process_that_a_test_left_behind_cannot_write_into_the_next_database(lender: Databases) -> None:
    with lender.lent("postgresql") as first:
        left = postgres.connect(first)
    with lender.lent("postgresql") as second:
        with pytest.raises(psycopg.OperationalError):
            insert(left)
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            postgres.connect(first)
        assert rows(second) == 0


def test_a_setting_that_one_test_made_is_gone_for_the_next(lender: Databases) -> None:
    with lender.lent("postgresql") as url, postgres.connect(url) as conn:
        conn.execute(f'ALTER DATABASE "{conn.info.dbname}" SET default_transaction_read_only = on')
    with lender.lent("postgresql") as url, postgres.connect(url) as conn:
        insert(conn)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE runs ADD COLUMN colour text",
        "DROP INDEX uq_groups_start",
        "ALTER TABLE runs ALTER COLUMN name DROP NOT NULL",
        "DROP VIEW lineage",
        "UPDATE alembic_version SET version_num = 'other'",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pk_runs'::regclass",
    ],
)
def test_a_database_of_another_schema_is_not_lent_again(lender: Databases, change: str) -> None:
    with lender.lent("postgresql") as url, postgres.connect(url) as conn:
        before = schema(url)
        conn.execute(change)
        assert schema(url) != before
    with lender.lent("postgresql") as url:
        assert schema(url) == before


def schema(url: str) -> list[tuple[object, ...]]:
    """Columns, indexes and revision."""
    with postgres.connect(url) as conn:
        columns = (
            "SELECT table_name, column_name, is_nullable FROM information_schema.columns WHERE table_schema='public'"
        )
        indexes = "SELECT tablename, indexname, '' FROM pg_indexes WHERE schemaname = 'public'"
        revision = "SELECT 'revision', version_num, '' FROM alembic_version"
        invalid = "SELECT 'invalid', indexrelid::regclass::text, '' FROM pg_index WHERE NOT indisvalid"
        parts = (columns, indexes, revision, invalid)
        return conn.execute(f"{' UNION ALL '.join(parts)} ORDER BY 1, 2").fetchall()
