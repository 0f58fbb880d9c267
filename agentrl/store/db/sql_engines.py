"""Opens SQLAlchemy engines for SQLite and PostgreSQL, with the settings that the store needs of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from agentrl.environment import without_password
from agentrl.errors import UserError
from agentrl.store.db import faults

BUSY_TIMEOUT_MS = 30_000
# Defaults for libpq; the URL's query may override each. A server that vanished is noticed within a minute.
POSTGRESQL_SETTINGS: dict[str, Any] = {
    "application_name": "agentrl",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# PostgreSQL rolls back a transaction that idles for so long, so that a stopped process releases its locks.
IDLE_IN_TRANSACTION_S = 60


def parse_url(url: str) -> URL:
    """A database URL, checked. Raises UserError for one that cannot work."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError for a port that is no number: the end of a password with an @
        raise UserError(
            f"database URL {without_password(url)!r} is not a SQLAlchemy URL, such as sqlite:///agentrl.db "
            "(@, : and / in a password are percent-encoded)"
        ) from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise UserError(f"database URL {without_password(url)!r}: only sqlite and postgresql are supported")
    if parsed.get_backend_name() == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise UserError("an in-memory SQLite database cannot be shared between processes; name a file")
    return parsed


def host_of(url: str) -> str:
    """The host of a database server; loopback for a file or a socket."""
    parsed = make_url(url)
    named = parsed.host or str(parsed.query.get("host", ""))
    return named if named and not named.startswith("/") else "127.0.0.1"


def is_file_uri(url: URL) -> bool:
    """Whether the URL names the file in SQLite's own URI form (`sqlite:///file:PATH?mode=ro&uri=true`)."""
    return str(url.database).startswith("file:")


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL, resolved; None for another database, or a file named in SQLite's own URI form."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or is_file_uri(parsed):
        return None
    return Path(parsed.database).resolve()


def sqlite_engine(url: URL) -> Engine:
    """Connections in WAL mode with full sync; a transaction begins with BEGIN IMMEDIATE where it may write."""
    if not is_file_uri(url):  # never makes a file: an empty one would look like a database that lost its content
        path = Path(str(url.database)).absolute().as_uri()
        url = url.set(database=path).update_query_dict({"mode": "rw", "uri": "true"})
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _on_connect(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = None  # `_on_begin` sends BEGIN, not the driver
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(conn: Connection) -> None:
        immediate = conn.get_execution_options().get("agentrl_immediate", False)
        statement = "BEGIN IMMEDIATE" if immediate else "BEGIN"
        with faults.of_driver(conn, statement) as cursor:
            cursor.execute(statement)

    return engine


def postgresql_engine(url: URL) -> Engine:
    """Connections at READ COMMITTED, checked before use. Raises UserError when psycopg is not installed."""
    settings = {name: value for name, value in POSTGRESQL_SETTINGS.items() if name not in url.query}
    try:
        engine = create_engine(url, pool_pre_ping=True, isolation_level="READ COMMITTED", connect_args=settings)
    except ModuleNotFoundError as error:
        raise UserError("PostgreSQL needs psycopg: pip install 'agentrl[postgres]'") from error

    @event.listens_for(engine, "connect")
    def _on_connect(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
        dbapi_connection.commit()

    return engine
