"""One database: its transactions, repeated over faults that pass, its schema, and its group commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, text

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.store.db import faults, sqlite_file
from agentrl.store.db.revisions import migrate, newest_revision, revision_of
from agentrl.store.db.sql_engines import is_file_uri, parse_url, postgresql_engine, sqlite_engine
from agentrl.store.db.writer import GroupCommitWriter, pauses

T = TypeVar("T")
RETRY_S = 60.0
SNAPSHOT = "REPEATABLE READ"


class Database:
    """A store at a SQLAlchemy URL. Safe to use from many threads, but not across a fork.

    Opening it makes no connection, but checks a SQLite file. Raises UserError for a URL that cannot work, StoreError
    for a SQLite file that is empty or cut off. `where` names the database in messages, without a password.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._file = Path(str(parsed.database)) if self.is_sqlite and not is_file_uri(parsed) else None
        self.where = f"database {parsed.database}" + (f" at {parsed.host}" if parsed.host else "")
        if self._file is not None:
            sqlite_file.require_local(self._file)
            sqlite_file.begin_use(self._file)
        self.engine = sqlite_engine(parsed) if self.is_sqlite else postgresql_engine(parsed)
        # All statements of a read see one snapshot, as they always do on SQLite.
        self._readers = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level=SNAPSHOT)
        self._writer: GroupCommitWriter | None = None
        self._writer_lock = threading.Lock()
        self._closed = False
        self.on_commit: Callable[[int, float], None] = _no_listener
        """Called after every group commit, in the writer's thread, with its units and the seconds that they took."""

    def write(self) -> AbstractContextManager[Connection]:
        """One transaction that may write, without retries; on SQLite it takes the write lock at its start.

        Raises StoreUnavailable for a fault that may pass (OutcomeUnknown: lost during COMMIT), else StoreError.
        """
        return self._transaction(writing=True)

    def read(self) -> AbstractContextManager[Connection]:
        """One transaction that only reads, from one snapshot, without retries. Raises as `write` does."""
        return self._transaction(writing=False)

    def transact(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `unit(conn, *args, **kwargs)` in a transaction of its own; returns its result once that is durable.

        Retried for up to RETRY_S while the database is unreachable or locked, after a deadlock, and when the connection
        was lost during COMMIT: so the unit must be safe to repeat even after it was stored. Then raises
        StoreUnavailable. Any other fault of the database is a StoreError; exceptions of the unit pass through.
        """
        return self._repeated(True, unit, args, kwargs)

    def query(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`transact` for a unit that only reads."""
        return self._repeated(False, unit, args, kwargs)

    def submit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Queue `unit(conn, *args, **kwargs)` for the next group commit; the future resolves after the commit.

        The rules of the group commit, and what a `BulkUnit` is for, are at `GroupCommitWriter`.
        """
        return self._group_commit().submit(unit, *args, **kwargs)

    def asubmit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """`submit` for a coroutine of the running event loop."""
        return self._group_commit().asubmit(unit, *args, **kwargs)

    @property
    def queued(self) -> int:
        """How many units wait for a group commit."""
        return 0 if self._writer is None else self._writer.queued

    def _group_commit(self) -> GroupCommitWriter:
        writer = self._writer
        if writer is None:
            with self._writer_lock:
                if self._writer is None:
                    if self._closed:
                        raise StoreError(f"{self.where} was closed by this process")
                    self._writer = GroupCommitWriter(self)
                writer = self._writer
        return writer

    def connect(self, *, writing: bool) -> Connection:
        """A connection without a transaction, for writing or only for reading. Raises as `write` does."""
        with faults.reported(self.where):
            try:
                conn = (self.engine if writing else self._readers).connect()
            except Exception:
                if self._file is not None and not self._file.exists():
                    raise StoreError(f"{self.where} does not exist: make it with `agentrl db upgrade`") from None
                raise
        return conn.execution_options(agentrl_immediate=True) if writing and self.is_sqlite else conn

    def deadline(self) -> float:
        """The time (`time.monotonic`) until which a fault that begins now is retried."""
        return time.monotonic() + RETRY_S

    def upgrade(self, revision: str = "head") -> None:
        """Upgrade the schema to a revision, creating a missing SQLite file; several processes may call it at once."""
        if self._file is not None:
            sqlite_file.create(self._file)
        if revision == "head" and self._revision() == newest_revision():
            return
        with self.write() as conn:
            migrate(conn, revision, up=True)

    def downgrade(self, revision: str) -> None:
        """Downgrade the schema to a revision; `base` leaves no tables. Data that only newer revisions hold is lost."""
        with self.write() as conn:
            migrate(conn, revision, up=False)

    def require_current(self) -> None:
        """Raise StoreError unless the schema is at the newest revision."""
        have, want = self._revision(), newest_revision()
        if have != want:
            raise StoreError(f"the database is at revision {have or 'none'}, not {want}: run `agentrl db upgrade`")

    def _revision(self) -> str | None:
        with self.read() as conn:
            return revision_of(conn)

    def integrity(self) -> list[str]:
        """Physical damage, one line each; empty for a sound database. Scans a SQLite file.

        PostgreSQL checks its own files by page checksums; the damage that it reports is listed.
        """
        checks = _SQLITE_CHECKS if self.is_sqlite else _POSTGRESQL_CHECKS
        try:
            if self._file is not None:
                sqlite_file.require_whole(self._file)
            with self.read() as conn:
                return [problem for check in checks for problem in conn.scalars(text(check)) if problem != "ok"]
        except StoreUnavailable:
            raise
        except StoreError as error:
            return [str(error)]

    def close(self) -> None:
        """Commit queued units, then close every connection. Afterwards no unit can be queued."""
        with self._writer_lock:
            again, self._closed, writer = self._closed, True, self._writer
        if writer is not None:
            writer.close()
        self.engine.dispose()
        if self._file is not None and not again:
            sqlite_file.end_use(self._file)

    @contextmanager
    def _transaction(self, *, writing: bool) -> Iterator[Connection]:
        with self.connect(writing=writing) as conn, faults.transaction(conn, self.where):
            yield conn

    def _repeated(self, writing: bool, unit: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        until = self.deadline()
        waits = pauses()
        while True:
            try:
                with self._transaction(writing=writing) as conn:
                    return unit(conn, *args, **kwargs)
            except StoreUnavailable:
                if time.monotonic() > until:
                    raise
            time.sleep(next(waits))


_SQLITE_CHECKS = (
    "SELECT quick_check FROM pragma_quick_check",
    """SELECT "table" || ', row ' || coalesce(rowid, '?') || ': its ' || parent || ' is missing'
       FROM pragma_foreign_key_check""",
)
_POSTGRESQL_CHECKS = (
    "SELECT 'index ' || indexrelid::regclass || ' is invalid: REINDEX it' FROM pg_index WHERE NOT indisvalid",
    """SELECT 'constraint ' || conname || ' of ' || conrelid::regclass || ' is not validated'
       FROM pg_constraint WHERE NOT convalidated""",
    """SELECT checksum_failures || ' pages failed their checksum' FROM pg_stat_database
       WHERE datname = current_database() AND checksum_failures > 0""",
)


def _no_listener(units: int, seconds: float) -> None:
    """The default of `Database.on_commit`."""
