"""Measures how a run gets its tasks, on SQLite and PostgreSQL: a Parquet file of a million rows, `agentrl run create`.

    python benchmarks/tasks.py --out benchmarks/results/tasks.json

- stored: tasks a second, over the whole life of the process, its start included.
- stored_per_cpu_s: tasks per second of CPU that the process used, which other programs on the machine affect less.
- first_group: seconds from the start of the process until a group got its task, while the rest is being stored.
- peak_memory: of the process, with all rows and with a tenth of them. Flat memory: the ratio is about 1.
- after_kill_9: the process is killed twice while it stores tasks. Then the same command ends the work. The figure is
  the number of rows that are missing, repeated, or visited in another order than without a kill; it must be 0.

PostgreSQL is the server that AGENTRL_TEST_POSTGRES_URL names, else the one on the local standard port.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import text
from store import fresh

from agentrl.store import Database, runs, task_rows
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.session_limits import Limits

LIMITS = Limits(
    group_size=1,
    min_group_size=1,
    max_concurrent_groups=1000,
    max_staleness=0,
    groups_per_step=1,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)
SAMPLED = 20_000
"""Cursors whose tasks are compared, spread over two passes."""


@dataclass(frozen=True)
class Made:
    """One `agentrl run create`."""

    wall_s: float
    first_group_s: float
    peak_mb: float
    cpu_s: float


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rows=(int, 1_000_000, "rows of the file"),
        rounds=(int, 3, "rounds of each figure but after_kill_9"),
        databases=(str, "sqlite,postgresql", "which databases"),
    )
    report = harness.Report("tasks")
    with tempfile.TemporaryDirectory(prefix="agentrl-tasks-") as folder:
        file = Path(folder) / "tasks.parquet"
        write_rows(file, options.rows)
        report.notes |= {"rows": options.rows, "file_mb": file.stat().st_size / 1e6, "load_before": os.getloadavg()[0]}
        orders = {}
        for backend in options.databases.split(","):
            whole, tenth = [], []
            for _ in range(options.rounds):
                with fresh(backend) as database:
                    whole.append(create(database, file, Path(folder)))
                    order = visited(database, options.rows)
                with fresh(backend) as database:
                    tenth.append(create(database, file, Path(folder), limit=options.rows // 10))
            report.add(f"{backend}/stored", [options.rows / made.wall_s for made in whole], "tasks/s")
            report.add(f"{backend}/stored_per_cpu_s", [options.rows / made.cpu_s for made in whole], "tasks/s")
            report.add(f"{backend}/first_group", [made.first_group_s for made in whole], "s")
            report.add(f"{backend}/peak_memory/tenth", [made.peak_mb for made in tenth], "MB")
            report.add(f"{backend}/peak_memory", [made.peak_mb for made in whole], "MB", f"{backend}/peak_memory/tenth")
            with fresh(backend) as database:
                killed_at = [interrupted(database, file, Path(folder), share, options.rows) for share in (0.3, 0.6)]
                create(database, file, Path(folder))
                wrong = wrong_rows(database, options.rows) + int((visited(database, options.rows) != order).sum())
            report.add(f"{backend}/after_kill_9", [float(wrong)], "rows")
            report.notes[f"{backend}/killed_at"] = killed_at
            orders[backend] = order
        if len(orders) > 1:
            first, *others = orders.values()
            report.notes["databases_agree"] = all((first == other).all() for other in others)
    report.notes["load_after"] = os.getloadavg()[0]
    harness.finish(report, options.out)


def write_rows(file: Path, rows: int) -> None:
    """A file of questions and answers, about 300 bytes a row."""
    words = [f"word{i}" for i in range(500)]
    chance = random.Random(0)
    schema = pa.schema([("n", pa.int64()), ("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(file, schema) as out:
        for first in range(0, rows, 10_000):
            numbers = range(first, min(first + 10_000, rows))
            questions = [" ".join(chance.choices(words, k=35)) for _ in numbers]
            out.write_table(pa.table([numbers, questions, [str(n * 7) for n in numbers]], schema=schema))


def start(database: Database, file: Path, folder: Path, limit: int | None) -> subprocess.Popen[str]:
    """`agentrl run create` of a run whose tasks are the file's."""
    config = folder / "run.yaml"
    source = {"path": str(file), "columns": {"question": "prompt"}, "ahead": None} | ({"limit": limit} if limit else {})
    run = {"name": "r", "model": "tiny", "steps": 0, "tasks": source, "runs_dir": str(folder / new_id())}
    config.write_text(json.dumps(run | {"database_url": database.url}))
    command = [sys.executable, "-m", "agentrl", "run", "create", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def create(database: Database, file: Path, folder: Path, limit: int | None = None) -> Made:
    """Create the run, or store the rest of its tasks; start a group as soon as its key is printed."""
    began = time.monotonic()
    process = start(database, file, folder, limit)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("export"), "no key was printed"
    run_id = database.query(lambda conn: runs.by_name(conn, "r").id)
    database.transact(group_starts.start_group, run_id, LIMITS, [new_id()])
    first_group_s = time.monotonic() - began
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"run create ended with {process.returncode}"
    return Made(wall_s, first_group_s, used.ru_maxrss / 1024, used.ru_utime + used.ru_stime)


def interrupted(database: Database, file: Path, folder: Path, share: float, rows: int) -> int:
    """Start the command, and kill it when it has stored a share of the rows; returns how many are stored then."""
    process = start(database, file, folder, None)
    while stored(database) < share * rows:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    process.kill()
    process.wait()
    return stored(database)


def stored(database: Database) -> int:
    """How many tasks the run has, by the record of its sources."""
    return database.query(lambda conn: conn.execute(text("SELECT coalesce(sum(stored), 0) FROM task_sources")).scalar())


def wrong_rows(database: Database, rows: int) -> int:
    """How many rows are missing, repeated or foreign."""
    seen = np.zeros(rows, dtype=np.int32)
    with database.read() as conn:
        found = conn.execution_options(stream_results=True).execute(text("SELECT data FROM tasks"))
        for chunk in found.partitions(10_000):
            for (data,) in chunk:
                seen[(json.loads(data) if isinstance(data, str) else data)["n"]] += 1
    return int((seen != 1).sum())


def visited(database: Database, rows: int) -> np.ndarray:
    """The tasks at cursors spread over two passes."""
    with database.read() as conn:
        run_id = runs.by_name(conn, "r").id
        cursors = range(0, 2 * rows, max(1, 2 * rows // SAMPLED))
        return np.array([task_rows.task_at(conn, run_id, cursor, 0).data["n"] for cursor in cursors])


if __name__ == "__main__":
    main()
