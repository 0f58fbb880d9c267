"""Measures leases and dashboard queries as a run grows, one batch to padded tensors, and concurrent leases."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import orjson
from sqlalchemy import Connection, insert, text

from agentrl.export.tensors import pad_batch
from agentrl.launch.views import snapshot
from agentrl.store import Database, runs
from agentrl.store.db import codec
from agentrl.store.tables import steps as steps_table
from agentrl.store.training import leases, step_resume, steps
from storage.filled import GROUP, PER_STEP, READY

DTYPES = {"input_ids": np.int32, "loss_mask": bool, "logprobs": np.float32, "versions": np.int32}


class _Undo(Exception):
    """Ends a timed transaction without keeping it."""


def _timed(database: Database, query: Callable[[Connection], Any]) -> float:
    """Milliseconds of `query` in a write transaction that is rolled back, so that every round reads the same rows."""
    elapsed = 0.0
    try:
        with database.write() as conn:
            start = time.perf_counter()
            query(conn)
            elapsed = 1000 * (time.perf_counter() - start)
            raise _Undo
    except _Undo:
        return elapsed


def measure_growth(report: harness.Report, sizes: dict[int, tuple[Database, str]], *, rounds: int) -> None:
    """Measure the same queries on stores of different sizes, interleaved."""
    name = next(iter(sizes.values()))[0].engine.dialect.name

    def lease(conn: Connection, run_id: str, step: int) -> None:
        assert steps.lease(conn, run_id, 1, step=step, n_groups=PER_STEP // GROUP, max_staleness=1, discount=1.0)

    def variants(query: Callable[[Connection, str, int], Any]) -> dict[str, Callable[[], float]]:
        return {
            f"{size:,}": lambda db=db, run_id=run_id, step=(size - READY) // PER_STEP + 1: _timed(
                db, lambda conn: query(conn, run_id, step)
            )
            for size, (db, run_id) in sizes.items()
        }

    base = f"{min(sizes):,}"
    dashboard = {
        "counts": lambda conn, run_id, _: runs.state_counts(conn, run_id),
        "progress": lambda conn, run_id, step: snapshot.take(conn, run_id, step - 2),
    }
    report.compare(f"{name}/lease_256", harness.interleave(variants(lease), rounds), "ms", base)
    for label, query in dashboard.items():
        report.compare(f"{name}/dashboard/{label}", harness.interleave(variants(query), rounds), "ms", base)


def measure_batch(report: harness.Report, database: Database, run_id: str, *, rounds: int) -> None:
    """Measure the way from rows to padded arrays: our packed columns, joined and credited, against complete JSON
    documents.
    """
    name = database.engine.dialect.name
    step = runs_step(database, run_id)
    step_id = database.transact(
        steps.lease, run_id, 1, step=step, n_groups=PER_STEP // GROUP, max_staleness=1, discount=1.0
    )
    with database.read() as conn:
        batch = steps.batch(conn, step_id)
    documents = [
        {
            "input_ids": t.input_ids.tolist(),
            "loss_mask": t.loss_mask.tolist(),
            "logprobs": t.logprobs.tolist(),
            "versions": t.versions.tolist(),
            "reward": t.episode_return,
        }
        for t in batch.trajectories
    ]
    with database.write() as conn:
        conn.execute(text("CREATE TABLE json_rows (id INTEGER PRIMARY KEY, body TEXT NOT NULL)"))
        conn.execute(
            text("INSERT INTO json_rows VALUES (:id, :body)"),
            [{"id": i, "body": orjson.dumps(document).decode()} for i, document in enumerate(documents)],
        )

    def packed() -> float:
        start = time.perf_counter()
        with database.read() as conn:
            pad_batch(steps.batch(conn, step_id).trajectories)
        return 1000 * (time.perf_counter() - start)

    def from_json(loads: Callable[[str], Any]) -> float:
        start = time.perf_counter()
        with database.read() as conn:
            rows = [loads(body) for body in conn.scalars(text("SELECT body FROM json_rows ORDER BY id"))]
        width = max(len(row["input_ids"]) for row in rows)
        for key, dtype in DTYPES.items():
            out = np.zeros((len(rows), width), dtype)
            for i, row in enumerate(rows):
                out[i, : len(row[key])] = row[key]
        return 1000 * (time.perf_counter() - start)

    variants = {"json": lambda: from_json(json.loads), "orjson": lambda: from_json(orjson.loads), "packed": packed}
    report.compare(f"{name}/batch_256_to_padded", harness.interleave(variants, rounds), "ms", base="json")
    with database.write() as conn:
        conn.execute(text("DROP TABLE json_rows"))
        step_resume.reconcile(conn, run_id, 1, None if step == 1 else _step_id(conn, run_id, step - 1))


def runs_step(database: Database, run_id: str) -> int:
    """The next step of the run."""
    return int(database.query(runs.get, run_id).published_step) + 1


def _step_id(conn: Connection, run_id: str, step: int) -> str:
    return next(row.id for row in steps.of_run(conn, run_id) if row.step == step)


def measure_leasers(report: harness.Report, database: Database, run_id: str, *, n: int = 8) -> None:
    """`n` processes claim the ready groups of one run. Fails if a group is claimed twice or not at all."""
    name = database.engine.dialect.name
    version = runs_step(database, run_id) - 1
    with database.write() as conn:
        ready = set(
            conn.scalars(text("SELECT id FROM groups WHERE run_id = :run AND state = 'ready'"), {"run": run_id})
        )
    context = multiprocessing.get_context("spawn")
    with context.Pool(n) as pool:
        start = time.perf_counter()
        taken = pool.starmap(_drain, [(database.url, run_id, version, 1_000_000 + i) for i in range(n)])
        wall_s = time.perf_counter() - start
    claimed = [group_id for part, _ in taken for group_id in part]
    if len(claimed) != len(set(claimed)) or set(claimed) != ready:
        raise SystemExit(f"{len(claimed)} groups were claimed, {len(set(claimed))} of them once, of {len(ready)}")
    waits = [wait for _, of_process in taken for wait in of_process]
    report.add(f"{name}/leasers_{n}/claim_8_trajectories", waits, "ms")
    report.notes[f"{name}/leasers_{n}"] = {
        "groups": len(ready),
        "claimed_twice": 0,
        "forgotten": 0,
        "busy_leasers": sum(bool(p) for p, _ in taken),
        "wall_s": round(wall_s, 2),
    }


def _drain(url: str, run_id: str, version: int, step: int) -> tuple[list[str], list[float]]:
    """Claim one group after another until none is left; returns their ids, and the milliseconds of each claim."""
    database, step_id = Database(url), codec.new_id()
    with database.write() as conn:
        conn.execute(
            insert(steps_table).values(
                id=step_id,
                run_id=run_id,
                epoch=1,
                step=step,
                state="started",
                version_before=version,
                max_staleness=1,
                turn_discount=1.0,
                metrics={},
                started_at=time.time(),
            )
        )
    taken: list[str] = []
    waits: list[float] = []
    young = {version, version - 1}
    empty = 0
    while empty < 3:
        start = time.perf_counter()
        with database.write() as conn:
            claim = leases.claim(conn, run_id, 1, young=young, policy="mask")
            if claim is not None:
                leases.assign(conn, claim, step_id, 1)
        if claim is None:
            empty += 1  # another process may have locked a group that we skipped, and may release it
            time.sleep(0.05)
            continue
        taken += claim.groups
        waits.append(1000 * (time.perf_counter() - start))
    database.close()
    return taken, waits
