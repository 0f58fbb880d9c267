"""Skips tasks whose success rate is outside the curriculum's target (`domain.curriculum`), as a group is admitted.

A skip is a row with the cursor and the success rate at that time. It is written in the transaction that moves the data
cursor past it, so a process that dies leaves both or neither, and the next one goes on with the same order.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, select

from agentrl.domain.curriculum import Curriculum
from agentrl.store import task_rows
from agentrl.store.sessions.group_admission import advance
from agentrl.store.sessions.task_success import success_rate
from agentrl.store.tables import skipped_tasks
from agentrl.store.task_rows import Draw

MOST_AT_ONCE = 64
"""Tasks that one admission skips; it takes the next one in any case."""


def next_draw(conn: Connection, run_id: str, cursor: int, seed: int, curriculum: Curriculum | None) -> tuple[int, Draw]:
    """The first cursor, from this one on, whose task is not skipped, and its task. Raises as `task_rows.draw` does."""
    draw = task_rows.draw(conn, run_id, cursor, seed)
    if curriculum is None:
        return cursor, draw
    for _ in range(MOST_AT_ONCE):
        if not curriculum.may_skip(seed, draw.task.position, draw.number_of_pass):
            break
        rate = success_rate(conn, run_id, draw.task.id, curriculum)
        if rate is None or not curriculum.is_outside(rate):
            break
        skipped = {"run_id": run_id, "cursor": cursor, "task_id": draw.task.id, "success_rate": rate}
        conn.execute(insert(skipped_tasks).values(skipped))
        cursor = advance(conn, run_id)
        draw = task_rows.draw(conn, run_id, cursor, seed)
    return cursor, draw


def count(conn: Connection, run_id: str) -> int:
    """How many tasks the run has skipped."""
    of_run = select(func.count()).select_from(skipped_tasks).where(skipped_tasks.c.run_id == run_id)
    return int(conn.execute(of_run).scalar_one())
