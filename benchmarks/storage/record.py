"""Measures recording against the raw driver and against a commit per row, and the bytes of a turn against JSON."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import harness

from agentrl.store import Database, runs
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.sessions import group_starts, session_limits
from storage import calls
from storage.calls import Call

BATCH = 64
SESSIONS = 64


def measure(report: harness.Report, database: Database, *, rounds: int, batches: int) -> None:
    """Every variant records the same number of calls per round, each with new ids, durably."""
    name = database.engine.dialect.name
    run_id, session_ids = _open_sessions(database)
    raw = _Raw(database)
    costs: dict[str, dict[str, list[float]]] = {"cpu": {}, "rate": {}}

    def variant(label: str, record: Callable[[list[Call]], None], n_batches: int) -> Callable[[], float]:
        def once() -> float:
            made = calls.make_calls(run_id, session_ids, n_batches * BATCH, seed=time.time_ns())
            if label.startswith("raw driver, packed"):
                prepared: Any = [(calls.intent_row(c), raw.closing(c), calls.packed(c)) for c in made]
            else:
                prepared = made
            wall, cpu = time.perf_counter(), time.process_time()
            for start in range(0, len(made), BATCH):
                record(prepared[start : start + BATCH])
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            costs["rate"].setdefault(label, []).append(len(made) / wall)
            return 1e6 * cpu / len(made)

        return once

    loop = asyncio.new_event_loop()

    async def as_the_proxy_does(batch: list[Call]) -> None:
        await asyncio.gather(*[database.asubmit(call_intents.begin, c.intent) for c in batch])
        finish = call_outcomes.finish
        await asyncio.gather(*[database.asubmit(finish, c.intent.id, c.intent.session_id, c.outcome) for c in batch])

    def recorder(batch: list[Call]) -> None:
        loop.run_until_complete(as_the_proxy_does(batch))

    def encode_and_write(batch: list[Call]) -> None:
        raw.write([(calls.intent_row(c), raw.closing(c), calls.packed(c)) for c in batch])

    def raw_per_row(batch: list[Call]) -> None:
        for c in batch:
            encode_and_write([c])

    def recorder_per_row(batch: list[Call]) -> None:
        for c in batch:
            recorder([c])

    few = max(1, batches // 4)
    costs["cpu"] = harness.interleave(
        {
            "raw driver, packed before": variant("raw driver, packed before", raw.write, batches),
            "raw driver": variant("raw driver", encode_and_write, batches),
            "recorder": variant("recorder", recorder, batches),
            "recorder, commit per row": variant("recorder, commit per row", recorder_per_row, few),
            "raw driver, commit per row": variant("raw driver, commit per row", raw_per_row, few),
        },
        rounds,
    )
    report.compare(f"{name}/record/cpu_per_row", costs["cpu"], "µs", base="raw driver")
    rates = {label: samples[1:] for label, samples in costs["rate"].items()}  # without the warm-up
    report.compare(f"{name}/record/rows_per_s", rates, "1/s", base="recorder, commit per row")
    raw.close()
    loop.close()


def measure_bytes(report: harness.Report) -> None:
    """Measure the bytes of a turn's messages, ids, logprobs and spans."""
    made = calls.make_calls("run", ["session"], 256)
    packed = [float(sum(len(v) for v in calls.packed(c).values())) for c in made]
    text = [float(sum(len(v.encode()) for v in calls.as_json(c).values())) for c in made]
    report.compare("bytes_per_turn", {"json": text, "packed": packed}, "B", base="json")


class _Raw:
    """Runs the statements of begin and finish by the driver itself: executemany, two transactions per batch, no
    lookups.
    """

    def __init__(self, database: Database) -> None:
        self._sqlite = database.is_sqlite
        dialect = database.engine.dialect.name
        self._sql: list[tuple[str, list[str]]] = [
            statement.on(dialect)
            for statement in (
                call_intents.INSERT_INTENT,
                call_outcomes.UPDATE_SESSION,
                call_outcomes.UPDATE_FINISHED,
                call_outcomes.INSERT_DATA,
            )
        ]
        if self._sqlite:
            self._conn: Any = sqlite3.connect(str(database.engine.url.database), isolation_level=None)
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                self._conn.execute(f"PRAGMA {pragma}")
        else:
            import psycopg

            url = database.engine.url.set(drivername="postgresql")
            self._conn = psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)

    def closing(self, call: Call) -> Any:
        """The parameters that close an intent: (of the session's update, of the interaction's update)."""
        now = time.time()
        session = {"key": call.intent.session_id, "seq": 1, "last_seen_at": now}
        return session, {
            "key": call.intent.id,
            "status": "complete",
            "seq": 1,
            "conversation_key": call.outcome.conversation_key.hex(),
            "output_tokens": len(call.outcome.output_ids),
            "cached_tokens": 0,
            "min_version": 0,
            "max_version": 0,
            "finish_reason": "stop",
            "engine_url": call.outcome.engine_url,
            "first_token_at": now,
            "finished_at": now,
            "kv_mixed": False,
            "textless_key": None,
        }

    def write(self, rows: list[Any]) -> None:
        """Write one batch: the intents in one transaction, everything else in a second one."""
        self._conn.execute("BEGIN IMMEDIATE" if self._sqlite else "BEGIN")
        self._many(0, [intent for intent, _, _ in rows])
        self._conn.execute("COMMIT")
        self._conn.execute("BEGIN IMMEDIATE" if self._sqlite else "BEGIN")
        self._many(1, [session for _, (session, _), _ in rows])
        self._many(2, [closed for _, (_, closed), _ in rows])
        self._many(3, [data for _, _, data in rows])
        self._conn.execute("COMMIT")

    def close(self) -> None:
        self._conn.close()

    def _many(self, which: int, rows: list[dict[str, Any]]) -> None:
        sql, names = self._sql[which]
        self._conn.cursor().executemany(sql, [tuple([row[name] for name in names]) for row in rows])


def _open_sessions(database: Database) -> tuple[str, list[str]]:
    limits = session_limits.Limits(
        group_size=SESSIONS,
        min_group_size=1,
        max_concurrent_groups=10,
        max_staleness=1,
        groups_per_step=10,
        turn_discount=1.0,
        reward_timeout_s=0.0,
        end_grace_s=30.0,
        session_timeout_s=900.0,
        session_max_s=86400.0,
        heartbeat_timeout_s=60.0,
    )
    with database.write() as conn:
        run_id = runs.create(
            conn, name="record", config={}, task_data=[{}], base_model="none", key="k", seed=0, steps=1
        )
        group = group_starts.start_group(conn, run_id, limits, [f"key-{i}" for i in range(SESSIONS)])
    return run_id, group.session_ids
