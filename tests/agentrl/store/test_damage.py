"""Faults of real databases. After each: acknowledged work is stored, nothing is stored twice, a failure says why in one
line, and the writer continues when the database does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import postgres
import pytest
from play import held
from postgres import Cluster
from sqlalchemy import Connection, event, make_url, select, text

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.store import Database, events, runs
from agentrl.store.db import database, faults, sql_engines
from agentrl.store.db.bulk_unit import bulk_unit
from agentrl.store.db.faults import OutcomeUnknown

TIMEOUT_S = 90  # longer than a fault is waited for
RUN = {"name": "test", "config": {}, "task_data": [{}], "base_model": "tiny", "key": "k", "seed": 0, "steps": 1}


def insert(conn: Connection, run_id: str, kind: str, size: int = 0) -> str:
    """Not safe to repeat: a second run would be a second row."""
    events.record(conn, run_id, kind, {"pad": "x" * size}, "test")
    return kind


def insert_many(conn: Connection, items: list[tuple[Any, ...]]) -> list[str]:
    return [insert(conn, *item) for item in items]


@bulk_unit(many=insert_many)
def insert_bulk(conn: Connection, run_id: str, kind: str, size: int = 0) -> str:
    return insert(conn, run_id, kind, size)


def insert_once(conn: Connection, run_id: str, kind: str) -> str:
    """Safe to repeat, as `transact` wants it."""
    if conn.scalar(select(events.events.c.id).where(events.events.c.kind == kind)) is None:
        insert(conn, run_id, kind)
    return kind


def stored(db: Database) -> list[str]:
    return db.query(lambda conn: list(conn.scalars(select(events.events.c.kind))))


def settle(futures: Iterable[Future[str]]) -> tuple[set[str], list[BaseException]]:
    """What was acknowledged, and the errors of the rest."""
    acknowledged, errors = set(), []
    for future in futures:
        if error := future.exception(TIMEOUT_S):
            errors.append(error)
        else:
            acknowledged.add(future.result())
    return acknowledged, errors


def check(db: Database, acknowledged: Iterable[str]) -> None:
    """The property of every test here."""
    kinds = stored(db)
    assert len(kinds) == len(set(kinds)), "stored twice"
    assert set(acknowledged) <= set(kinds), "acknowledged, but not stored"


def one_line(error: BaseException) -> str:
    assert isinstance(error, StoreError)
    assert "\n" not in str(error)
    return str(error)


def terminate_others(url: str) -> int:
    """Cut every connection to a PostgreSQL database; how many there were."""
    with postgres.connect(url) as conn:
        cut = conn.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int((cut.fetchone() or [0])[0])


def open_store(url: str) -> tuple[Database, str]:
    """A migrated store with a run."""
    db = Database(url)
    db.upgrade()
    with db.write() as conn:
        return db, runs.create(conn, **RUN)


@pytest.fixture
def postgresql(databases) -> Iterator[Database]:
    with databases.lent("postgresql") as url:
        db = Database(url)
        yield db
        db.close()


@pytest.fixture
def sqlite(databases) -> Iterator[Database]:
    with databases.lent("sqlite") as url:
        db = Database(url)
        yield db
        db.close()


def new_run(db: Database) -> str:
    with db.write() as conn:
        return runs.create(conn, **RUN)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are waited for half a second."""
    monkeypatch.setattr(database, "RETRY_S", 0.5)
    monkeypatch.setattr(sql_engines, "BUSY_TIMEOUT_MS", 100)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A PostgreSQL server of our own, which we may treat badly."""
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries are installed")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-pg-", dir="/tmp"))  # short, and its user can reach it
    cluster = Cluster(folder, binaries)
    cluster.create()
    cluster.start()
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)


@pytest.fixture
def fragile(server: Cluster) -> Iterator[Database]:
    """A store on that server."""
    with postgres.connect(server.url) as conn:
        conn.execute("CREATE DATABASE fragile")
    url = server.url.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", "/fragile?")
    db = Database(url)
    db.upgrade()
    yield db
    db.close()
    with postgres.connect(server.url) as conn:
        conn.execute("DROP DATABASE fragile WITH (FORCE)")


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A folder on a file system of this size."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-disk-", dir="/tmp"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("mounting a small file system is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


# Killed processes

WRITER = """
import os, sys, threading
from agentrl.store import Database
sys.path.insert(0, sys.argv[3])
from test_damage import insert_bulk
db = Database(sys.argv[1])
def work(name):
    for i in range(10**9):
        kind = db.submit(insert_bulk, sys.argv[2], f"{name}-{i}", 2000).result()
        os.write(1, f"{kind}\\n".encode())
for name in range(4):
    threading.Thread(target=work, args=(name,)).start()
"""


@pytest.mark.parametrize("after", [1, 200])
def test_kill_9_loses_nothing_that_was_acknowledged(db: Database, run_id: str, after: int):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, db.url, run_id, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(postgres.__file__).parent)},
    )
    assert child.stdout is not None
    acknowledged = [child.stdout.readline().strip() for _ in range(after)]
    os.kill(child.pid, signal.SIGKILL)
    acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
    child.wait()
    assert acknowledged[-1]
    check(db, acknowledged)
    assert db.integrity() == []
    again = Database(db.url)  # a new process opens it as it was left
    assert again.submit(insert, run_id, "next").result(TIMEOUT_S) == "next"
    again.close()


# PostgreSQL: connections


def test_a_connection_lost_between_batches_is_replaced(postgresql: Database):
    run_id = new_run(postgresql)
    assert postgresql.submit(insert, run_id, "before").result(TIMEOUT_S) == "before"
    assert terminate_others(postgresql.url) > 0
    assert postgresql.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
    assert postgresql.transact(insert_once, run_id, "transact") == "transact"
    check(postgresql, ["before", "after", "transact"])


def test_a_connection_lost_in_the_middle_of_a_batch_repeats_the_batch(postgresql: Database):
    run_id = new_run(postgresql)
    attempts = []

    def cut_once(conn: Connection) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            assert terminate_others(postgresql.url) > 0
        return insert(conn, run_id, "cut")

    with held(postgresql):
        futures = [postgresql.submit(insert_bulk, run_id, f"a{i}") for i in range(5)]
        futures += [postgresql.submit(insert, run_id, "b"), postgresql.submit(cut_once)]
        futures += [postgresql.submit(insert, run_id, "c")]
    acknowledged, errors = settle(futures)
    assert errors == []
    assert len(attempts) == 2
    assert sorted(stored(postgresql)) == sorted(acknowledged) == ["a0", "a1", "a2", "a3", "a4", "b", "c", "cut"]


def test_transact_repeats_when_its_connection_is_lost(postgresql: Database):
    run_id = new_run(postgresql)
    attempts = []

    def cut_once(conn: Connection) -> str:
        insert_once(conn, run_id, "a")
        attempts.append(1)
        if len(attempts) == 1:
            assert terminate_others(postgresql.url) > 0
        return "done"

    assert postgresql.transact(cut_once) == "done"
    assert len(attempts) == 2
    assert stored(postgresql) == ["a"]


@pytest.fixture
def trap(postgresql: Database) -> Database:
    """A store in which COMMIT cuts the connection when the transaction wrote to the table `trap`."""
    for statement in (
        "CREATE TABLE trap (a INTEGER)",
        "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$",
        "CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON trap DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION cut()",
    ):
        postgresql.transact(lambda conn, statement=statement: conn.exec_driver_sql(statement))
    return postgresql


def test_a_connection_lost_during_commit_fails_units_with_an_unknown_outcome(trap: Database):
    run_id = new_run(trap)
    with held(trap):
        cut = trap.submit(lambda conn: conn.execute(text("INSERT INTO trap VALUES (1)")).rowcount)
        beside = trap.submit(insert, run_id, "beside")
    for future in (cut, beside):
        with pytest.raises(OutcomeUnknown, match="outcome is unknown") as raised:
            future.result(TIMEOUT_S)
        one_line(raised.value)
    assert trap.submit(insert, run_id, "next").result(TIMEOUT_S) == "next"
    check(trap, ["next"])


def test_transact_repeats_after_a_connection_lost_during_commit(trap: Database):
    run_id = new_run(trap)
    attempts = []

    def unit(conn: Connection) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            conn.execute(text("INSERT INTO trap VALUES (1)"))
        return insert_once(conn, run_id, "a")

    assert trap.transact(unit) == "a"
    assert len(attempts) == 2
    assert stored(trap) == ["a"]


def test_a_stopped_process_does_not_hold_its_locks_for_ever(postgresql: Database):
    """Its transaction idles; the server ends it, and what comes back to it is told so, or repeated."""
    run_id = new_run(postgresql)
    attempts = []

    def sleepy(conn: Connection) -> str:
        attempts.append(1)
        insert_once(conn, run_id, "sleepy")
        if len(attempts) == 1:
            conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            with postgres.connect(postgresql.url) as other:
                idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = %s"
                while other.execute(idle, [make_url(postgresql.url).database]).fetchone() != (0,):
                    pass
        return insert_once(conn, run_id, "awake")

    assert postgresql.transact(sleepy) == "awake"
    assert len(attempts) == 2
    assert sorted(stored(postgresql)) == ["awake", "sleepy"]


# PostgreSQL: the server


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_restarted_server_loses_and_doubles_nothing(server: Cluster, fragile: Database, mode: str):
    run_id = new_run(fragile)
    acknowledged: set[str] = set()
    failures: list[BaseException] = []
    stop = threading.Event()

    def submit(name: int) -> None:
        i = 0
        while not stop.is_set():
            batch = [fragile.submit(insert_bulk, run_id, f"{name}-{i + j}", 500) for j in range(8)]
            i += 8
            done, errors = settle(batch)
            acknowledged.update(done)
            failures.extend(errors)

    def transact() -> None:
        i = 0
        while not stop.is_set():
            acknowledged.add(fragile.transact(insert_once, run_id, f"transact-{i}"))
            i += 1

    threads = [threading.Thread(target=submit, args=(name,)) for name in range(4)]
    threads.append(threading.Thread(target=transact))
    for thread in threads:
        thread.start()
    for _ in range(3):
        so_far = len(acknowledged)
        while len(acknowledged) < so_far + 200 and any(thread.is_alive() for thread in threads):
            stop.wait(0.01)
        server.restart(mode)
    so_far = len(acknowledged)
    while len(acknowledged) < so_far + 100 and any(thread.is_alive() for thread in threads):  # the writer goes on
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(acknowledged) > 700
    assert all(isinstance(error, OutcomeUnknown) for error in failures)
    check(fragile, acknowledged)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_stays_away_is_said_and_comes_back(server: Cluster, fragile: Database):
    run_id = new_run(fragile)
    assert fragile.submit(insert, run_id, "before").result(TIMEOUT_S) == "before"
    server.stop()
    try:
        futures = [fragile.submit(insert, run_id, f"away{i}") for i in range(3)]
        acknowledged, errors = settle(futures)
        assert acknowledged == set()
        for error in errors:
            assert isinstance(error, StoreUnavailable)
            assert "try again" in one_line(error)
        for ask in (fragile.transact, fragile.query):
            with pytest.raises(StoreUnavailable, match="try again"):
                ask(lambda conn: conn.scalar(text("SELECT 1")))
    finally:
        server.start()
    assert fragile.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
    assert sorted(stored(fragile)) == ["after", "before"]


@pytest.mark.usefixtures("impatient")
def test_closing_while_the_server_is_away_ends(server: Cluster, fragile: Database):
    run_id = new_run(fragile)
    server.stop()
    try:
        futures = [fragile.submit(insert, run_id, str(i)) for i in range(600)]
        fragile.close()
        assert settle(futures)[0] == set()
    finally:
        server.start()


def test_a_full_disk_of_the_server_is_said(server: Cluster, fragile: Database):
    run_id = new_run(fragile)
    with small_disk("2m") as folder:
        os.chown(folder, *server.owner)
        with postgres.connect(fragile.url) as conn:
            conn.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
            conn.execute("ALTER TABLE events SET TABLESPACE small")
        acknowledged, errors = fill_up(fragile, run_id)
        assert "disk is full" in one_line(errors[0])
        check(fragile, acknowledged)
        with postgres.connect(fragile.url) as conn:
            conn.execute("ALTER TABLE events SET TABLESPACE pg_default")
            conn.execute("DROP TABLESPACE small")
        assert fragile.submit(insert, run_id, "after", 10_000).result(TIMEOUT_S) == "after"
        check(fragile, [*acknowledged, "after"])


def fill_up(db: Database, run_id: str, most: int = 20_000) -> tuple[set[str], list[BaseException]]:
    """Submit batches until one fails."""
    acknowledged: set[str] = set()
    for start in range(0, most, 50):
        done, errors = settle([db.submit(insert_bulk, run_id, str(start + i), 900) for i in range(50)])
        acknowledged |= done
        if errors:
            return acknowledged, errors
    raise AssertionError("the disk never became full")


def test_a_read_only_server_is_said(postgresql: Database):
    run_id = new_run(postgresql)
    name = make_url(postgresql.url).database
    with postgres.connect(postgresql.url) as conn:
        conn.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    standby = Database(postgresql.url)
    for error in refusals(standby, run_id):
        assert "read-only" in one_line(error)
    assert standby.query(events.of_run, run_id) == []
    standby.close()


def refusals(db: Database, run_id: str) -> list[BaseException]:
    """The errors of one write in each way."""
    with pytest.raises(StoreError) as raised:
        db.transact(insert, run_id, "never")
    _, errors = settle([db.submit(insert, run_id, "never"), db.submit(insert, run_id, "never")])
    assert len(errors) == 2
    assert not any(isinstance(error, StoreUnavailable) for error in (raised.value, *errors))
    return [raised.value, *errors]


# SQLite


def test_a_read_only_file_is_said(sqlite: Database):
    run_id = new_run(sqlite)
    read_only = Database(f"sqlite:///file:{make_url(sqlite.url).database}?mode=ro&uri=true")
    for error in refusals(read_only, run_id):
        assert "read-only" in one_line(error)
    assert read_only.query(events.of_run, run_id) == []
    read_only.close()


LOCKER = """
import sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
conn.execute("ROLLBACK")
"""


@contextmanager
def locked(db: Database) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the write lock until it reads a line, or the block ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(make_url(db.url).database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    try:
        yield child
    finally:
        child.communicate("\n", timeout=TIMEOUT_S)


@pytest.mark.usefixtures("impatient")
def test_a_file_that_stays_locked_is_said(databases):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        with locked(db):
            with pytest.raises(StoreUnavailable, match="locked by another process"):
                db.transact(insert, run_id, "never")
            _, errors = settle([db.submit(insert, run_id, f"never{i}") for i in range(3)])
            for error in errors:
                assert isinstance(error, StoreUnavailable)
                assert "locked by another process" in one_line(error)
            assert len(errors) == 3
            assert stored(db) == []  # readers do not wait
        assert db.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
        assert stored(db) == ["after"]
        db.close()


def test_a_file_that_is_unlocked_in_time_delays_and_loses_nothing(databases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sql_engines, "BUSY_TIMEOUT_MS", 50)
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        refused = threading.Barrier(3)  # both writers were, at least once
        met = threading.local()

        def meet(*args: Any, **kwargs: Any) -> StoreError:
            if not hasattr(met, "once"):
                met.once = refused.wait(TIMEOUT_S)
            return told(*args, **kwargs)

        told = faults.store_error
        monkeypatch.setattr(faults, "store_error", meet)
        results: list[str] = []
        with locked(db) as child:
            future = db.submit(insert, run_id, "submitted")
            thread = threading.Thread(target=lambda: results.append(db.transact(insert_once, run_id, "transact")))
            thread.start()
            refused.wait(TIMEOUT_S)
            assert not future.done()
            child.stdin.write("\n")
            child.stdin.flush()
            assert future.result(TIMEOUT_S) == "submitted"
            thread.join(TIMEOUT_S)
        assert results == ["transact"]
        assert sorted(stored(db)) == ["submitted", "transact"]
        db.close()


def test_a_full_file_is_said_and_grows_again_with_space(sqlite: Database):
    run_id = new_run(sqlite)
    limit = [200]

    @event.listens_for(sqlite.engine, "begin")
    def _limit(conn: Connection) -> None:
        raw = conn.connection.driver_connection
        raw.execute(f"PRAGMA max_page_count = {limit[0]}").fetchall()

    acknowledged, errors = fill_up(sqlite, run_id)
    assert len(errors) == 50  # the whole batch
    for error in errors:
        assert "disk is full, and nothing was stored: free space" in one_line(error)
    check(sqlite, acknowledged)
    limit[0] = 100_000
    assert sqlite.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
    assert set(stored(sqlite)) == acknowledged | {"after"}
    assert sqlite.integrity() == []


def test_a_full_disk_loses_nothing_and_the_writer_resumes_with_space():
    with small_disk("3m") as folder:
        (folder / "ballast").write_bytes(bytes(500_000))
        db, run_id = open_store(f"sqlite:///{folder}/store.db")
        acknowledged, errors = fill_up(db, run_id)
        assert "disk" in one_line(errors[0])
        check(db, acknowledged)
        (folder / "ballast").unlink()
        assert db.submit(insert, run_id, "after").result(TIMEOUT_S) == "after"
        check(db, [*acknowledged, "after"])
        assert db.integrity() == []
        db.close()


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[3])
from test_damage import fill_up
from agentrl.store import Database
db = Database(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
acknowledged, errors = fill_up(db, sys.argv[2])
print(errors[0])
print(*acknowledged)
"""


def test_a_file_size_limit_is_said_and_loses_nothing(sqlite: Database):
    run_id = new_run(sqlite)
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, sqlite.url, run_id, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(postgres.__file__).parent)},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    error, acknowledged = child.stdout.splitlines()
    assert "file-size limits" in error or "disk is full" in error
    assert acknowledged
    check(sqlite, acknowledged.split())
    assert sqlite.integrity() == []


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_store_that_was_cut_off_is_not_served(databases, part: float):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        settle(db.submit(insert_bulk, run_id, str(i), 1000) for i in range(200))
        db.close()
        file = Path(str(make_url(url).database))
        os.truncate(file, int(file.stat().st_size * part))
        with pytest.raises(StoreError, match=r"(is empty|is cut off).*restore a backup") as raised:
            Database(url)
        one_line(raised.value)


def test_a_store_with_a_scrambled_page_is_said(databases):
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        settle(db.submit(insert_bulk, run_id, str(i), 1000) for i in range(200))
        root = db.query(lambda conn: conn.scalar(text("SELECT rootpage FROM sqlite_master WHERE name = 'events'")))
        db.close()
        with Path(str(make_url(url).database)).open("r+b") as file:
            file.seek((root - 1) * 4096)
            file.write(b"\xa5" * 4096)
        db = Database(url)
        assert db.integrity() != []
        with pytest.raises(StoreError, match=r"damaged.*restore a backup") as raised:
            db.query(events.of_run, run_id)
        one_line(raised.value)
        _, errors = settle([db.submit(insert, run_id, "never")])
        assert "damaged" in one_line(errors[0])
        db.close()
