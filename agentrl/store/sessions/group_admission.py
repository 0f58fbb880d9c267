"""Admission: whether a run takes another group now, by one conditional UPDATE of its counters.

A place is free while `admitted - returned` is below the capacity of the staleness that engines leave
(`trainer.max_staleness` minus `publish.lag`) and `running` is below `max_concurrent_groups`.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Column, Connection, Row, update

from agentrl.domain.staleness import capacity
from agentrl.errors import RequestError
from agentrl.store import runs
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import runs as runs_table

NO_CAPACITY = "no_capacity"
RETRY_AFTER_S = 0.5
WAITS_S = 5.0
"""How long a refused client counts as waiting for a place; `agentrl.client` asks again sooner."""


def admit(conn: Connection, run_id: str, limits: Limits, *, outside: bool) -> tuple[int, int]:
    """Take one place for a group and one position of the data cursor, by one conditional UPDATE.

    While workers and outside programs both wait, they take places in turn: the side that took the last place leaves
    one free. Returns (cursor, seed).

    Raises RequestError: 409 `run_finished`, 429 while staleness or concurrency forbid more.
    """
    run = runs.get(conn, run_id)
    if run.status != "running":
        raise closed_run(run)
    bound, spare = _bound(run, limits), int(_is_others_turn(run, outside))
    cursor = conn.execute(
        update(runs_table)
        .where(
            runs_table.c.id == run_id,
            runs_table.c.status == "running",
            runs_table.c.published_step == run.published_step,
            runs_table.c.admitted - runs_table.c.returned + spare < bound,
            runs_table.c.running + spare < limits.max_concurrent_groups,
        )
        .values(
            admitted=runs_table.c.admitted + 1,
            running=runs_table.c.running + 1,
            data_cursor=runs_table.c.data_cursor + 1,
            outside_had_last=outside,
            **{_asked_at(outside).name: None},
        )
        .returning(runs_table.c.data_cursor)
    ).scalar_one_or_none()
    if cursor is None:
        raise RequestError(
            429,
            "no capacity for another group: the trainer must catch up",
            code=NO_CAPACITY,
            retry_after_s=RETRY_AFTER_S,
        )
    return int(cursor) - 1, int(run.seed)


def advance(conn: Connection, run_id: str) -> int:
    """Pass over one position of the data cursor, in the transaction of `admit`; returns the position after it."""
    moved = update(runs_table).where(runs_table.c.id == run_id).values(data_cursor=runs_table.c.data_cursor + 1)
    return int(conn.execute(moved.returning(runs_table.c.data_cursor)).scalar_one()) - 1


def closed_run(run: Row[Any]) -> RequestError:
    """The error for a run that takes no more groups."""
    why = run.error if run.status == "failed" and run.error else "it takes no more groups"
    return RequestError(409, f"run {run.name} is {run.status}: {why}", code=f"run_{run.status}")


def note_waiting(conn: Connection, run_id: str, *, outside: bool) -> None:
    """Record that a worker, or an outside program, was refused a place: it counts as waiting for WAITS_S."""
    asked_at, now = _asked_at(outside), time.time()
    noted = asked_at.between(now - WAITS_S / 5, now)
    conn.execute(update(runs_table).where(runs_table.c.id == run_id, noted.isnot(True)).values({asked_at: now}))


def _asked_at(outside: bool) -> Column[Any]:
    return runs_table.c.outside_asked_at if outside else runs_table.c.worker_asked_at


def _is_others_turn(run: Row[Any], outside: bool) -> bool:
    asked_at = run.worker_asked_at if outside else run.outside_asked_at
    return run.outside_had_last == outside and asked_at is not None and abs(time.time() - asked_at) < WAITS_S


def free_slots(conn: Connection, run_id: str, limits: Limits) -> int:
    """How many groups `admit` would take right now."""
    run = runs.get(conn, run_id)
    if run.status != "running":
        return 0
    free = min(_bound(run, limits) - (run.admitted - run.returned), limits.max_concurrent_groups - run.running)
    return max(0, int(free))


def _bound(run: Row[Any], limits: Limits) -> int:
    return capacity(
        max_staleness=limits.max_staleness - limits.lag,  # an engine may sample with a version that much older
        published_step=run.published_step,
        groups_per_step=limits.groups_per_step,
        target_steps=run.target_steps,
    )
