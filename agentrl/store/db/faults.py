"""Classifies errors of either database, and turns them into StoreError with advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, TimeoutError

from agentrl.errors import StoreError, StoreUnavailable, ValueRefused


class Fault(Enum):
    """Kinds of faults, by how a caller must react."""

    LOST = "lost"  # no connection, or a broken one: a new one may work
    BUSY = "busy"  # another process holds the lock
    CONFLICT = "conflict"  # a deadlock or a serialization failure: rolled back, repeat it
    FULL = "full"
    IO = "io"
    READ_ONLY = "read only"
    DAMAGED = "damaged"
    UNOPENED = "unopened"
    STATEMENT = "statement"  # a fault of the statement (a constraint, bad SQL); the database works


_SQLITE = {
    5: Fault.BUSY,
    6: Fault.BUSY,  # SQLITE_LOCKED
    8: Fault.READ_ONLY,
    10: Fault.IO,
    11: Fault.DAMAGED,
    13: Fault.FULL,
    14: Fault.UNOPENED,
    26: Fault.DAMAGED,  # SQLITE_NOTADB
}
# SQLSTATEs, or their first two digits. 57P0x: shut down, crashed, starting; 25P03, 57P05: idle for too long; 53300:
# too many connections.
_POSTGRESQL = {
    "08": Fault.LOST,
    "57P01": Fault.LOST,
    "57P02": Fault.LOST,
    "57P03": Fault.LOST,
    "57P05": Fault.LOST,
    "25P03": Fault.LOST,
    "53300": Fault.LOST,
    "40P01": Fault.CONFLICT,
    "40001": Fault.CONFLICT,
    "55P03": Fault.BUSY,
    "53100": Fault.FULL,
    "58030": Fault.IO,
    "25006": Fault.READ_ONLY,
    "XX001": Fault.DAMAGED,
    "XX002": Fault.DAMAGED,
}
# A refused connection has no SQLSTATE; these words mark faults that waiting cannot resolve.
_HOPELESS = ("does not exist", "authentication failed", "no pg_hba.conf entry", "no password supplied", "not permitted")

_ADVICE = {
    Fault.BUSY: "it is locked by another process: try again",
    Fault.CONFLICT: "it met another transaction's locks: try again",
    Fault.LOST: "the connection failed: try again",
    Fault.FULL: "its disk is full, and nothing was stored: free space, then try again",
    Fault.IO: "its disk cannot be read or written: check the disk, its free space and file-size limits, then try again",
    Fault.READ_ONLY: "it is read-only: check the rights of the file and its folder (PostgreSQL: that it is no standby)",
    Fault.DAMAGED: "it is damaged: stop everything that uses it and restore a backup made by `agentrl store backup`",
    Fault.UNOPENED: "it cannot be opened: check its address, that it exists, and who may use it",
}


class OutcomeUnknown(StoreUnavailable):
    """The connection was lost during COMMIT: the work may or may not be stored."""


class Conflict(StoreUnavailable):
    """The transaction was rolled back because of other transactions; the caller repeats it."""


def classify(error: DBAPIError) -> Fault:
    """The kind of an error from either database."""
    cause = error.orig
    if error.connection_invalidated:
        return Fault.LOST
    if code := getattr(cause, "sqlite_errorcode", None):
        return _SQLITE.get(code & 0xFF, Fault.STATEMENT)
    if state := getattr(cause, "sqlstate", None):
        return _POSTGRESQL.get(state) or _POSTGRESQL.get(state[:2], Fault.STATEMENT)
    if isinstance(error, OperationalError) and type(cause).__module__.startswith("psycopg"):  # it could not connect
        return Fault.UNOPENED if any(words in str(cause) for words in _HOPELESS) else Fault.LOST
    return Fault.STATEMENT


def store_error(error: DBAPIError, where: str = "database", *, committing: bool = False) -> StoreError:
    """The error to raise for `error`: one line with the database and advice.

    `committing`: COMMIT was running.
    """
    fault, detail = classify(error), " ".join(str(error.orig).split())
    if committing and fault is Fault.LOST:
        return OutcomeUnknown(f"{where}: the connection was lost during COMMIT, so the outcome is unknown ({detail})")
    if fault is Fault.STATEMENT:
        if isinstance(error, DataError):
            return ValueRefused(detail)
        return StoreError(f"{where}: {detail}")
    kind: type[StoreError] = StoreError
    if fault is Fault.CONFLICT:
        kind = Conflict
    elif fault in (Fault.LOST, Fault.BUSY):
        kind = StoreUnavailable
    return kind(f"{where}: {_ADVICE[fault]} ({detail})")


@contextmanager
def reported(where: str) -> Iterator[None]:
    """Turn the database's exceptions into StoreError and StoreUnavailable."""
    try:
        yield
    except DBAPIError as error:
        raise store_error(error, where) from error
    except TimeoutError as error:
        raise StoreUnavailable(f"{where}: all of this process's connections are in use: try again") from error


@contextmanager
def of_driver(conn: Connection, sql: str) -> Iterator[Any]:
    """A cursor of the driver, without SQLAlchemy; its exceptions become the ones that SQLAlchemy would raise."""
    cursor = conn.connection.cursor()
    try:
        yield cursor
    except conn.dialect.loaded_dbapi.Error as error:
        lost = conn.dialect.is_disconnect(error, conn.connection.driver_connection, cursor)
        if lost:
            conn.invalidate(error)
        base = conn.dialect.loaded_dbapi.Error
        raise DBAPIError.instance(sql, None, error, base, connection_invalidated=lost, dialect=conn.dialect) from error


@contextmanager
def transaction(conn: Connection, where: str) -> Iterator[None]:
    """One transaction, committed at the end of the block; the database's exceptions become StoreError.

    Raises OutcomeUnknown when the connection was lost during COMMIT.
    """
    committing = False
    try:
        with conn.begin():
            yield
            if not is_sound(conn):
                raise StoreError(f"{where}: a statement failed and the transaction went on: nothing was stored")
            committing = True
    except DBAPIError as error:
        raise store_error(error, where, committing=committing) from error


def is_sound(conn: Connection) -> bool:
    """Whether COMMIT would store the transaction.

    After a failed statement, PostgreSQL turns COMMIT into ROLLBACK without an error. After some faults, SQLite ends the
    transaction by itself.
    """
    raw = conn.connection.driver_connection
    assert raw is not None
    if conn.dialect.name == "sqlite":
        return bool(raw.in_transaction)
    return bool(raw.info.transaction_status.name != "INERROR")
