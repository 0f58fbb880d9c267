"""Fresh databases of both kinds, fast: each is a copy of one that Alembic has built once per process of a test session.

    SQLite         template ── copied ──► lent to a test ── removed
    PostgreSQL     template ── copied ──► lent to a test ── renamed, emptied ──► lent to the next test
                                                │
                                                └ dropped if the test changed its schema or made it large

PostgreSQL takes a quarter of a second to copy and drop a database, and a few milliseconds to empty one. The new name
keeps out a process that a test left behind.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import postgres
import pytest
from sqlalchemy import make_url

from agentrl.store import Database

KINDS = ("sqlite", "postgresql")
LARGEST_BYTES = 32 * 2**20
"""A larger PostgreSQL database is not lent again: the rows that a test deleted may still fill it."""
SCHEMA = """
    SELECT coalesce(sum(hashtextextended(item, 0)), 0) FROM (
        SELECT concat_ws(' ', c.relname, c.relkind, a.attname, a.atttypid, a.attnotnull, a.attnum) AS item
        FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE c.relnamespace = 'public'::regnamespace
        UNION ALL SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace
        UNION ALL SELECT concat_ws(' ', c.relname, i.indisvalid, i.indisready)
        FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = 'public'::regnamespace
        UNION ALL SELECT concat_ws(' ', tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT version_num FROM alembic_version
    ) AS items"""
"""A number that differs when tables, columns, indexes, constraints, triggers, functions or the revision differ."""
EMPTIED = """
    DO $$ DECLARE name text; BEGIN
        SET LOCAL session_replication_role = replica;  -- foreign keys are not checked: every table is emptied
        FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version'
        LOOP EXECUTE format('DELETE FROM %I', name); END LOOP;
    END $$"""


class Databases:
    """Makes databases and drops them. `folder` is for the SQLite files; servers are looked for when first asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._admin_url: str | None = None
        self._looked = False
        self._templates: dict[str, str] = {}
        self._schema: int | None = None  # of the PostgreSQL template
        self._thread = ThreadPoolExecutor(1, "databases")
        self._returned: deque[Future[str | None]] = deque()  # of PostgreSQL; None: it was dropped
        self._drops: list[Future[None]] = []

    def new(self, kind: str, *, migrated: bool = True) -> str:
        """SQLAlchemy URL of a new database; skips the test when there is no server for it."""
        if migrated and kind not in self._templates:
            self._templates[kind] = self._create(kind, template=None)
            database = Database(self._templates[kind])
            database.upgrade()
            database.close()
            if kind == "postgresql":
                with postgres.connect(self._templates[kind]) as conn:
                    self._schema = next(conn.execute(SCHEMA))[0]
        if not migrated:
            return self._create(kind, None)
        template = self._templates[kind]
        if kind == "sqlite":
            return self._create(kind, template)
        while self._returned:
            if url := self._returned.popleft().result():
                return url
        return self._create(kind, template)

    @contextmanager
    def lent(self, kind: str, *, migrated: bool = True) -> Iterator[str]:
        """A new database until the block ends; it is gone when the test session ends, at the latest."""
        url = self.new(kind, migrated=migrated)
        try:
            yield url
        finally:
            if kind == "postgresql" and migrated:
                self._returned.append(self._thread.submit(self._empty, url))
            else:
                self._drops.append(self._thread.submit(self.drop, url))

    def drop(self, url: str) -> None:
        """Remove a database, whoever is still connected to it."""
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            for suffix in ("", "-wal", "-shm"):
                Path(f"{parsed.database}{suffix}").unlink(missing_ok=True)
        else:
            self._admin(f'DROP DATABASE IF EXISTS "{parsed.database}" WITH (FORCE)')

    def close(self) -> None:
        """Remove what was lent and the templates. Raises what kept one from being removed."""
        self._thread.shutdown()
        for url in [*filter(None, (future.result() for future in self._returned)), *self._templates.values()]:
            self.drop(url)
        for drop in self._drops:
            drop.result()

    def _empty(self, url: str) -> str | None:
        """Close the connections of a PostgreSQL database, rename it and delete its rows; returns its new URL.
        Drops it and returns None if it is large or its schema is no longer the template's.
        """
        new = make_url(url).set(database=self._name()).render_as_string(hide_password=False)
        before, after = make_url(url).database, make_url(new).database
        self._admin(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{before}'")
        self._admin(f'ALTER DATABASE "{before}" RENAME TO "{after}"')
        self._admin(f'ALTER DATABASE "{after}" RESET ALL')
        with postgres.connect(new) as conn:
            sizes = conn.execute(f"SELECT ({SCHEMA}), pg_database_size(current_database())").fetchone()
            assert sizes is not None
            if sizes[0] == self._schema and sizes[1] < LARGEST_BYTES:
                conn.execute(EMPTIED)
                return new
        self.drop(new)
        return None

    def _name(self) -> str:
        return f"agentrl_test_{os.getpid()}_{uuid4().hex[:12]}"

    def _create(self, kind: str, template: str | None) -> str:
        name = self._name()
        if kind == "sqlite":
            file = self._folder / f"{name}.db"
            if template is not None:  # closed, so nothing of it is in a write-ahead log
                shutil.copyfile(str(make_url(template).database), file)
            return f"sqlite:///{file}"
        source = f'TEMPLATE "{make_url(template).database}"' if template else ""
        self._admin(f'CREATE DATABASE "{name}" {source}')
        url = make_url(str(self._admin_url)).set(drivername="postgresql+psycopg", database=name)
        return url.render_as_string(hide_password=False)

    def _admin(self, statement: str) -> None:
        if not self._looked:
            self._admin_url, self._looked = postgres.find_server(), True
        if self._admin_url is None:
            pytest.skip(postgres.NO_SERVER)
        with postgres.connect(self._admin_url) as conn:
            conn.execute(statement)
