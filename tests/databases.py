"""Fresh databases of both kinds, fast: each is a copy of one that Alembic has built once per process of a test session.

PostgreSQL takes a quarter of a second to copy and drop one: a thread makes the next copy while a test uses the last.
"""

from __future__ import annotations

import os
import shutil
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


class Databases:
    """Makes databases and drops them. `folder` is for the SQLite files; servers are looked for when first asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._admin_url: str | None = None
        self._looked = False
        self._templates: dict[str, str] = {}
        self._thread = ThreadPoolExecutor(1, "databases")
        self._spare: Future[str] | None = None
        self._drops: list[Future[None]] = []

    def new(self, kind: str, *, migrated: bool = True) -> str:
        """SQLAlchemy URL of a new database; skips the test when there is no server for it."""
        if migrated and kind not in self._templates:
            self._templates[kind] = self._create(kind, template=None)
            database = Database(self._templates[kind])
            database.upgrade()
            database.close()
        if not migrated:
            return self._create(kind, None)
        template = self._templates[kind]
        if kind == "sqlite":
            return self._create(kind, template)
        url = self._spare.result() if self._spare else self._create(kind, template)
        self._spare = self._thread.submit(self._create, kind, template)
        return url

    @contextmanager
    def lent(self, kind: str, *, migrated: bool = True) -> Iterator[str]:
        """A new database until the block ends; it is gone when the test session ends, at the latest."""
        url = self.new(kind, migrated=migrated)
        try:
            yield url
        finally:
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
        """Remove what was lent, the spare database and the templates. Raises what kept one from being removed."""
        self._thread.shutdown()
        spare = [self._spare.result()] if self._spare else []
        for url in [*spare, *self._templates.values()]:
            self.drop(url)
        for drop in self._drops:
            drop.result()

    def _create(self, kind: str, template: str | None) -> str:
        name = f"agentrl_test_{os.getpid()}_{uuid4().hex[:12]}"
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
