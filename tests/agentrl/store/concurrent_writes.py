"""Two connections that write at once, and the counters of a run that they leave."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import sleep
from typing import Any

from sqlalchemy import select

from agentrl.store import Database, runs
from agentrl.store.sessions import (
    child_sessions,
    session_limits,
)
from agentrl.store.tables import groups

LET_IT_WAIT_S = 0.2  # for a thread to reach a lock that the test holds


def meanwhile(db: Database, first: Callable[..., Any], second: Callable[..., Any]) -> tuple[Any, Any]:
    """`first(conn)` and, on another connection before the first commits, `second(conn)`; what each returned."""
    with ThreadPoolExecutor(1) as pool:
        with db.write() as conn:
            one = first(conn)
            other: Future[Any] = pool.submit(db.transact, second)
            sleep(LET_IT_WAIT_S)
        return one, other.result()


def counters(db: Database, run_id: str) -> tuple[int, int, int]:
    with db.read() as conn:
        run = runs.get(conn, run_id)
    return run.admitted, run.running, run.returned


def state(db: Database, group_id: str) -> str:
    with db.read() as conn:
        return str(conn.execute(select(groups.c.state).where(groups.c.id == group_id)).scalar_one())


def child_of(db: Database, parent_id: str, limits: session_limits.Limits) -> str:
    with db.write() as conn:
        (child_id,) = child_sessions.start_child(conn, parent_id, limits, f"key of {parent_id}", {}).session_ids
    return child_id
