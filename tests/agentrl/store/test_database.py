"""The group-commit writer: nothing is acknowledged that is not durable, and one bad unit hurts nobody."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from sqlalchemy import select, text

from agentrl.errors import StoreError, UserError
from agentrl.store import Database, events


def insert(conn, run_id, kind):
    events.record(conn, run_id, kind, {}, "test")
    return kind


def explode(conn, run_id):
    events.record(conn, run_id, "never", {}, "test")
    raise ValueError("boom")


def test_a_failing_unit_rolls_back_alone(db, run_id):
    good = [db.submit(insert, run_id, str(i)) for i in range(20)]
    bad = db.submit(explode, run_id)
    more = db.submit(insert, run_id, "last")
    assert [f.result(10) for f in [*good, more]] == [*map(str, range(20)), "last"]
    with pytest.raises(ValueError, match="boom"):
        bad.result(10)
    with db.read() as conn:
        assert [e.kind for e in events.of_run(conn, run_id)] == [*map(str, range(20)), "last"]


def test_units_that_wait_share_a_commit(db, run_id):
    commits = []
    from sqlalchemy import event

    event.listen(db.engine, "commit", lambda conn: commits.append(1))
    with db.write():  # the writer cannot begin, so units pile up
        futures = [db.submit(insert, run_id, str(i)) for i in range(50)]
        time.sleep(0.05)
    for future in futures:
        future.result(10)
    assert len(commits) < 10


def test_a_lost_database_fails_every_unit(tmp_path):
    db = Database(f"sqlite:///{tmp_path}/s.db")
    db.upgrade()
    with db.write() as conn:
        conn.execute(text("DROP TABLE events"))
    with pytest.raises(Exception, match="no such table"):
        db.submit(insert, "run", "kind").result(10)


@pytest.mark.parametrize("url", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_bad_urls_are_refused(url):
    with pytest.raises(UserError):
        Database(url)


def test_an_old_schema_names_the_command(tmp_path):
    db = Database(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(StoreError, match="agentrl db upgrade"):
        db.require_current()


WRITER = """
import sys
from agentrl.store import Database, events
db = Database(sys.argv[1])
i = 0
while True:
    db.submit(events.record, sys.argv[2], str(i), {}, "child").result()
    print(i, flush=True)
    i += 1
"""


def test_kill_9_loses_nothing_that_was_acknowledged(db, run_id):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), db.url, run_id], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    acknowledged = [child.stdout.readline().strip() for _ in range(30)]
    os.kill(child.pid, signal.SIGKILL)
    acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
    child.wait()
    with db.read() as conn:
        stored = {row.kind for row in conn.execute(select(events.events.c.kind))}
    assert set(acknowledged) <= stored
