"""Copies the whole database to a file while other processes write to it."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url

from agentrl.errors import StoreError, UserError
from agentrl.files import atomic_file
from agentrl.store.db.database import Database

PAGES = 1024
"""SQLite pages copied at a time."""
Progress = Callable[[int, int], None]
"""Called with (pages done, pages in all); PostgreSQL does not report it."""


def backup(
    database: Database, target: Path, *, force: bool = False, progress: Progress = lambda done, total: None
) -> None:
    """Copy the database to the file `target`, as one snapshot with everything that was committed before the start.

    SQLite: a database file like the original. PostgreSQL: an archive for pg_restore. The copy is checked and durable
    before it gets its name. Only its owner may read it. A failure leaves no file. Raises UserError when `target` is in
    the way or pg_dump cannot do it, StoreError when the database cannot be read, the disk is full, or the copy is not
    sound.
    """
    if target.is_dir():
        raise UserError(f"{target} is a folder: name a file")
    if target.exists() and not force:
        raise UserError(f"{target} exists: name another file, or give --force to replace it")
    log = Path(f"{target}-wal")
    if log.exists() and log.stat().st_size:
        raise UserError(f"{log} exists: {target} is a database in use; name another file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as draft:
            if database.is_sqlite:
                _copy_sqlite(database, draft, progress)
            else:
                _dump_postgresql(database, draft)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from error


def _copy_sqlite(database: Database, draft: Path, progress: Progress) -> None:
    with database.connect(writing=False) as conn:
        source = conn.connection.driver_connection
        assert source is not None
        try:
            with closing(sqlite3.connect(draft, isolation_level=None)) as copy:
                copy.execute("PRAGMA synchronous=OFF")  # the complete copy is synced
                # A read transaction of our own holds one snapshot: without it every commit of another process would
                # make the copy begin again.
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM sqlite_master").fetchone()
                try:
                    source.backup(copy, pages=PAGES, progress=lambda _, left, total: progress(total - left, total))
                finally:
                    source.execute("ROLLBACK")
                problems = [row[0] for row in copy.execute("PRAGMA quick_check") if row[0] != "ok"]
        except sqlite3.Error as error:
            raise StoreError(f"{database.where}: the backup failed: {error}") from error
    if problems:
        raise StoreError(f"{database.where} is damaged, so it is not copied: {problems[0]}")


def _dump_postgresql(database: Database, draft: Path) -> None:
    with database.read() as conn:
        server = int(conn.execute(text("SHOW server_version_num")).scalar_one()) // 10000
    program = shutil.which("pg_dump")
    if program is None:
        raise UserError(f"pg_dump is not installed: PostgreSQL {server} needs it of version {server} or newer")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)", told)
    if found is None or int(found[1]) < server:
        raise UserError(f"{program} is too old ({told.strip()}): PostgreSQL {server} needs version {server} or newer")
    uri, environment = _for_libpq(make_url(database.url))
    command = [program, "--format=custom", "--no-password", f"--file={draft}", f"--dbname={uri}"]
    done = subprocess.run(
        command, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StoreError(f"{database.where}: pg_dump failed: {' '.join(done.stderr.split())}")


def _for_libpq(url: URL) -> tuple[str, dict[str, str]]:
    """A URL for libpq without its password, and the environment that holds it."""
    password = url.password or url.query.get("password")
    plain = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    plain = plain.difference_update_query(["password"])
    return plain.render_as_string(hide_password=False), {"PGPASSWORD": str(password)} if password else {}
