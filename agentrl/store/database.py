"""One database: transactions, migrations, and the writer that commits many units of work at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from agentrl.errors import StoreError, UserError

T = TypeVar("T")
BUSY_TIMEOUT_MS = 30_000
MAX_UNITS_PER_COMMIT = 256
_MIGRATION_LOCK = 0x61676E74  # PostgreSQL advisory lock


class Database:
    """A store at a SQLAlchemy URL. Safe to use from many threads; never across a fork.

    Raises UserError for a URL that cannot work, StoreError when the database cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _create_engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._writer: GroupCommitWriter | None = None
        self._writer_lock = threading.Lock()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction that may write; on SQLite it takes the write lock at its start."""
        try:
            with self.engine.connect() as conn:
                if self.is_sqlite:
                    conn.execution_options(agentrl_immediate=True)
                with conn.begin():
                    yield conn
        except DBAPIError as error:
            raise StoreError(_one_line(error)) from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One transaction that only reads."""
        try:
            with self.engine.connect() as conn, conn.begin():
                yield conn
        except DBAPIError as error:
            raise StoreError(_one_line(error)) from error

    def submit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Queue `unit(conn, *args, **kwargs)` for the next group commit; the future resolves after the commit."""
        with self._writer_lock:
            if self._writer is None:
                self._writer = GroupCommitWriter(self)
        return self._writer.submit(unit, *args, **kwargs)

    def upgrade(self) -> None:
        """Bring the schema to the newest revision; several processes may call it at once."""
        with self.write() as conn:
            if not self.is_sqlite:
                conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            command.upgrade(_alembic_config(conn), "head")

    def require_current(self) -> None:
        """Raise StoreError unless the schema is at the newest revision."""
        with self.read() as conn:
            have = MigrationContext.configure(conn).get_current_revision()
        want = ScriptDirectory.from_config(_alembic_config()).get_current_head()
        if have != want:
            raise StoreError(f"the database is at revision {have or 'none'}, not {want}: run `agentrl db upgrade`")

    def close(self) -> None:
        """Finish queued work, then close every connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.engine.dispose()


class GroupCommitWriter:
    """A thread that drains a queue: all units waiting are committed together, each in its own savepoint.

    A unit that raises rolls back alone and its future carries the error. A commit that fails fails every unit in it:
    nothing is acknowledged that is not durable.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[Connection], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentrl-store-writer", daemon=True)
        self._thread.start()

    def submit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a unit of work."""
        future: Future[T] = Future()
        self._queue.put((future, lambda conn: unit(conn, *args, **kwargs)))
        return future

    def close(self) -> None:
        """Commit what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            units = [first]
            closing = False
            while len(units) < MAX_UNITS_PER_COMMIT and not self._queue.empty():
                unit = self._queue.get()
                if unit is None:
                    closing = True
                    break
                units.append(unit)
            self._commit(units)
            if closing:
                return

    def _commit(self, units: list[tuple[Future[Any], Callable[[Connection], Any]]]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            with self._database.write() as conn:
                for future, unit in units:
                    try:
                        with conn.begin_nested():
                            outcomes.append((future, unit(conn), None))
                    except Exception as error:  # noqa: BLE001 - not swallowed: it goes to whoever submitted the unit
                        outcomes.append((future, None, error))
        except Exception as error:  # noqa: BLE001 - the commit failed, so every unit in it did
            outcomes = [(future, None, error) for future, _ in units]
        for future, value, failure in outcomes:
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)


def _create_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UserError(f"database URL {url!r} is not a SQLAlchemy URL, such as sqlite:///agentrl.db") from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "postgresql":
        return create_engine(parsed, pool_pre_ping=True)
    if parsed.get_backend_name() != "sqlite":
        raise UserError(f"database URL {url!r}: only sqlite and postgresql are supported")
    if not parsed.database or parsed.database == ":memory:":
        raise UserError("an in-memory SQLite database cannot be shared between processes; name a file")
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _on_connect(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = None  # we say BEGIN ourselves
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(conn: Connection) -> None:
        immediate = conn.get_execution_options().get("agentrl_immediate", False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _alembic_config(connection: Connection | None = None) -> AlembicConfig:
    config = AlembicConfig()
    config.set_main_option("script_location", str(files("agentrl.migrations")))
    config.attributes["connection"] = connection
    return config


def _one_line(error: DBAPIError) -> str:
    return f"database error: {' '.join(str(error.orig).split())}"
