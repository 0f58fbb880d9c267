"""Backups made during writes: consistent, complete up to their start, and usable."""

import os
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from history import History
from sqlalchemy import make_url, select

from agentrl.errors import StoreError, UserError
from agentrl.store import Database
from agentrl.store.audit import run_audit
from agentrl.store.tables import rewards as rewards_table
from agentrl.store.training import rewards, steps
from agentrl.store.upkeep import backup


@pytest.fixture
def writer(db: Database):
    """A thread that adds rewards as fast as it can; `acknowledged` holds the values that were committed."""
    history = History(db)
    history.train(2)
    session_id = history.group().session_ids[0]
    acknowledged: list[float] = []
    going, stop = threading.Event(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            value = float(len(acknowledged))
            db.submit(rewards.add, session_id, value=value, discount=0.9, name="n", source="writer").result()
            acknowledged.append(value)
            if value == 20:
                going.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert going.wait(120)
    yield history, acknowledged
    stop.set()
    thread.join()


def written(db: Database) -> list[float]:
    """What the writer stored, in its order."""
    with db.read() as conn:
        query = select(rewards_table.c.value).where(rewards_table.c.source == "writer")
        return list(conn.execute(query.order_by(rewards_table.c.id)).scalars())


def assert_is_a_copy(copy: Database, history: History, before: list[float], after: list[float]) -> None:
    values = written(copy)
    assert values == [float(i) for i in range(len(values))], "a prefix of what was written"
    assert len(before) <= len(values) <= len(after) + 1  # one may be committed and not acknowledged yet
    copy.require_current()
    assert copy.integrity() == []
    assert copy.query(lambda conn: list(run_audit.scan(conn, history.run_id))) == []
    for step in copy.query(steps.of_run, history.run_id):
        batch = copy.query(steps.batch, step.id)
        assert batch.digest() == step.batch_digest == history.batches[step.step].digest()


@pytest.fixture
def restored(databases, database_kind, tmp_path):
    """Gives a backup back as a database."""
    made: list[Database] = []
    urls: list[str] = []

    def restore(file: Path) -> Database:
        if database_kind == "sqlite":
            made.append(Database(f"sqlite:///{file}"))
            return made[-1]
        urls.append(databases.new("postgresql", migrated=False))
        uri = make_url(urls[-1]).set(drivername="postgresql").render_as_string(hide_password=False)
        subprocess.run(["pg_restore", "--no-owner", "--exit-on-error", f"--dbname={uri}", file], check=True)
        made.append(Database(urls[-1]))
        return made[-1]

    yield restore
    for database in made:
        database.close()
    for url in urls:
        databases.drop(url)


@pytest.mark.long_on("postgresql")
def test_a_backup_under_writes_is_a_prefix_with_everything_that_was_acknowledged(
    db, writer, restored, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(backup, "PAGES", 4)  # so that commits come between
    history, acknowledged = writer
    before = list(acknowledged)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        n, until = len(acknowledged), time.monotonic() + 120
        while len(seen) < 6 and len(acknowledged) == n:  # the writer is not held up
            assert time.monotonic() < until, "nothing can be committed while it copies"
            time.sleep(0.001)

    backup.backup(db, tmp_path / "copy", progress=progress)
    after = list(acknowledged)
    assert_is_a_copy(restored(tmp_path / "copy"), history, before, after)
    if db.is_sqlite:
        assert len(seen) > 6
        assert len({total for _, total in seen}) == 1
        assert [done for done, _ in seen] == sorted({done for done, _ in seen}), "commits made it begin again"
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_run_continues_on_its_backup(db, restored, tmp_path) -> None:
    history = History(db)
    history.train(1)
    backup.backup(db, tmp_path / "copy")
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600  # it holds every conversation
    history.db = restored(tmp_path / "copy")
    history.train(2)
    assert history.db.query(lambda conn: list(run_audit.scan(conn, history.run_id))) == []
    assert len(history.db.query(steps.of_run, history.run_id)) == 3


@pytest.mark.long_on("postgresql")
def test_an_existing_file_is_replaced_only_with_force(db, restored, tmp_path) -> None:
    target = tmp_path / "copy"
    target.write_text("precious")
    with pytest.raises(UserError, match="--force"):
        backup.backup(db, target)
    assert target.read_text() == "precious"
    backup.backup(db, target, force=True)
    restored(target).require_current()
    with pytest.raises(UserError, match="is a folder"):
        backup.backup(db, tmp_path)


def test_a_database_in_use_is_never_replaced(databases, tmp_path) -> None:
    with databases.lent("sqlite") as url:
        db = Database(url)
        target = tmp_path / "copy"
        backup.backup(db, target)
        used = Database(f"sqlite:///{target}")
        history = History(used)
        with pytest.raises(UserError, match="in use"):
            backup.backup(db, target, force=True)
        assert used.query(lambda conn: list(run_audit.scan(conn, history.run_id))) == []
        used.close()
        db.close()


def test_a_damaged_database_is_not_copied(databases, tmp_path) -> None:
    with databases.lent("sqlite") as url:
        db = Database(url)
        History(db).train(3)
        db.close()
        file = Path(make_url(url).database)
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 8192] = os.urandom(8192)
        file.write_bytes(content)
        db = Database(url)
        with pytest.raises(StoreError):
            backup.backup(db, tmp_path / "copy")
        db.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(databases, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with databases.lent("sqlite") as url:
        db = Database(url)
        with pytest.raises(StoreError, match="cannot write"):
            backup.backup(db, tmp_path / "file" / "copy")
        db.close()


@pytest.fixture
def fake_pg_dump(tmp_path, monkeypatch):
    """Puts a script called pg_dump first on the path, or leaves no pg_dump at all."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(script: str | None) -> None:
        monkeypatch.setenv("PATH", str(folder) + (f":{os.environ['PATH']}" if script else ""))
        if script:
            (folder / "pg_dump").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "pg_dump").chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (None, UserError, "pg_dump is not installed"),
        ("echo 'pg_dump (PostgreSQL) 9.6.2'", UserError, "too old"),
        (
            "[ $1 = --version ] && echo 'pg_dump (PostgreSQL) 99.1' || { echo 'no luck' >&2; exit 1; }",
            StoreError,
            "no luck",
        ),
    ],
)
def test_a_missing_or_failing_pg_dump_is_named(databases, tmp_path, fake_pg_dump, script, error, message) -> None:
    with databases.lent("postgresql") as url:
        db = Database(url)
        fake_pg_dump(script)
        with pytest.raises(error, match=message):
            backup.backup(db, tmp_path / "copy")
        db.close()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize("given", ["user:s3cr%40t@", "user@?password=s3cr%40t"])
def test_the_password_is_in_no_command_line(given) -> None:
    account, query = [*given.split("?"), ""][:2]
    url = make_url(f"postgresql+psycopg://{account}localhost:5433/db?{query}&sslmode=disable")
    uri, environment = backup._for_libpq(url)
    assert environment == {"PGPASSWORD": "s3cr@t"}
    assert uri == "postgresql://user@localhost:5433/db?sslmode=disable"
