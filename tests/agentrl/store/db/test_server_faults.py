"""A PostgreSQL server that restarts, stops, is full or read-only."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
from postgres import Cluster
from sqlalchemy import make_url, text

from agentrl.errors import StoreUnavailable
from agentrl.store import Database, events
from agentrl.store.db.faults import OutcomeUnknown

from .fault_checks import (
    TIMEOUT_S,
    check,
    fill_up,
    insert,
    insert_bulk,
    insert_once,
    new_run,
    one_line,
    refusals,
    settle,
    small_disk,
    stored,
)


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


@pytest.mark.parametrize("mode", ["immediate", pytest.param("fast", marks=pytest.mark.long)])
def test_a_server_restart_neither_loses_nor_duplicates_writes(server: Cluster, fragile: Database, mode: str):
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
def test_a_server_that_stays_away_is_reported_and_used_when_it_is_back(server: Cluster, fragile: Database):
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
def test_close_returns_while_the_server_is_away(server: Cluster, fragile: Database):
    run_id = new_run(fragile)
    server.stop()
    try:
        futures = [fragile.submit(insert, run_id, str(i)) for i in range(600)]
        fragile.close()
        assert settle(futures)[0] == set()
    finally:
        server.start()


def test_a_full_disk_of_the_server_is_reported(server: Cluster, fragile: Database):
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


def test_a_read_only_server_is_reported(postgresql: Database):
    run_id = new_run(postgresql)
    name = make_url(postgresql.url).database
    with postgres.connect(postgresql.url) as conn:
        conn.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    standby = Database(postgresql.url)
    for error in refusals(standby, run_id):
        assert "read-only" in one_line(error)
    assert standby.query(events.of_run, run_id) == []
    standby.close()
