"""The tasks of a run: their sources, how they are stored bit by bit, and which one a place of the data cursor gets.

Task k of source s, of n sources, has the position k·n + s.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from agentrl.configs.episodes.task_sources import MAX_SOURCES
from agentrl.domain import task_order
from agentrl.domain.schemas import Json
from agentrl.domain.task_order import BLOCK
from agentrl.errors import RequestError, UserError
from agentrl.store.db import bulk, faults
from agentrl.store.db.codec import json_text, new_id
from agentrl.store.tables import runs, task_sources, tasks

RETRY_AFTER_S = 0.5
NOT_STORED = "task_not_stored"
"""The code of the refusal while the next task is not stored yet."""
OF_SOURCE = ("name", "weight", "block", "content", "window")
COLUMNS = ("id", "run_id", "position", "data")
MOST = 2**31 // MAX_SOURCES
"""Tasks that a source may have, so that a position fits into its column."""
_INSERT = bulk.insert(tasks, *COLUMNS)
_COPY = f"COPY tasks ({', '.join(COLUMNS)}) FROM STDIN"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSource:
    """A source of a new run."""

    name: str
    weight: float = 1.0
    block: int = BLOCK
    content: Json | None = None
    window: Json | None = None  # width and over of `domain.task_order.rising`


@dataclass(frozen=True, slots=True)
class Draw:
    """A task, and the number of the pass over its source, from 0."""

    task: Row[Any]
    number_of_pass: int


def add_sources(conn: Connection, run_id: str, sources: Sequence[NewSource]) -> None:
    """Insert the sources of a new run, without tasks."""
    empty: Json = {"run_id": run_id, "stored": 0, "rows_read": 0, "complete": False}
    rows = [
        {**empty, "source": number, **{name: getattr(s, name) for name in OF_SOURCE}}
        for number, s in enumerate(sources)
    ]
    conn.execute(insert(task_sources), rows)


def sources(conn: Connection, run_id: str) -> list[Row[Any]]:
    """The sources of a run, in order; none for a run whose programs bring their own tasks."""
    of_run = select(task_sources).where(task_sources.c.run_id == run_id)
    return list(conn.execute(of_run.order_by(task_sources.c.source)))


def add(
    conn: Connection, run_id: str, source: int, texts: Sequence[str], *, read_before: int, read: int, complete: bool
) -> bool:
    """Store further tasks of a source, as JSON text, which are the rows `read_before` to `read` of it.

    Returns False, and stores nothing, unless exactly `read_before` rows were read before: another process, or an
    earlier try of this one, has stored them.
    """
    grown = conn.execute(
        update(task_sources)
        .where(
            task_sources.c.run_id == run_id,
            task_sources.c.source == source,
            task_sources.c.rows_read == read_before,
            task_sources.c.complete.is_(False),
        )
        .values(stored=task_sources.c.stored + len(texts), rows_read=read, complete=complete)
        .returning(task_sources.c.stored)
    ).scalar_one_or_none()
    if grown is None:
        return False
    if grown > MOST:
        raise UserError(f"tasks: a source has at most {MOST} tasks; give a `limit`")
    count = select(func.count()).select_from(task_sources).where(task_sources.c.run_id == run_id)
    step = conn.execute(count).scalar_one()
    first = (grown - len(texts)) * step + source
    if conn.dialect.name == "sqlite":
        rows = [
            {"id": new_id(), "run_id": run_id, "position": first + i * step, "data": text}
            for i, text in enumerate(texts)
        ]
        bulk.run(conn, _INSERT, rows)
        return True
    with faults.of_driver(conn, _COPY) as cursor, cursor.copy(_COPY) as copy:
        for i, text in enumerate(texts):
            copy.write_row((new_id(), run_id, first + i * step, text))
    return True


def add_complete(conn: Connection, run_id: str, data: Sequence[Json]) -> None:
    """Store one complete source: all of `data`."""
    add_sources(conn, run_id, [NewSource(name="tasks")])
    add(conn, run_id, 0, [json_text(task) for task in data], read_before=0, read=len(data), complete=True)


def start_again(conn: Connection, run_id: str, source: int, content: Json | None) -> bool:
    """Forget the tasks of a source, because its files have changed. Returns False, and forgets nothing, for a run that
    has started groups.
    """
    conn.execute(select(runs.c.id).where(runs.c.id == run_id).with_for_update())
    if conn.execute(select(runs.c.data_cursor).where(runs.c.id == run_id)).scalar_one():
        return False
    step = len(sources(conn, run_id))
    conn.execute(delete(tasks).where(tasks.c.run_id == run_id, tasks.c.position % step == source))
    conn.execute(
        update(task_sources)
        .where(task_sources.c.run_id == run_id, task_sources.c.source == source)
        .values(stored=0, rows_read=0, complete=False, content=content)
    )
    return True


def task_at(conn: Connection, run_id: str, cursor: int, seed: int) -> Row[Any]:
    """The task at a position of the data cursor. Raises as `draw` does."""
    return draw(conn, run_id, cursor, seed).task


def draw(conn: Connection, run_id: str, cursor: int, seed: int) -> Draw:
    """The task at a position of the data cursor, and in which pass over its source (`domain.task_order`).

    Raises RequestError: 409 when the run has no tasks, 429 while this one is not stored yet.
    """
    found = sources(conn, run_id)
    number, nth = task_order.pick(cursor, [source.weight for source in found], seed) if found else (0, 0)
    source = found[number] if found else None
    if source is None or (source.complete and not source.stored):
        raise RequestError(409, "this run has no tasks: open sessions with POST /sessions", code="no_tasks")
    number_of_pass = nth // source.stored if source.complete else 0
    if source.window is not None:
        position: int | None = None
        if source.complete:
            how = {"width": source.window["width"], "over": source.window["over"], "key": f"{seed}/{number}"}
            number_of_pass, position = task_order.rising(nth, stored=source.stored, **how)
    elif source.block == 0:
        number_of_pass, offset = divmod(nth, source.stored)
        position = _order_of_old_runs(seed, number_of_pass, source.stored)[offset]
    else:
        position = task_order.position(
            nth, stored=source.stored, complete=source.complete, block=source.block, key=f"{seed}/{number}"
        )
    if position is None:
        raise RequestError(
            429,
            f"the next task is not stored yet: {source.stored} tasks of {source.name} are",
            code=NOT_STORED,
            retry_after_s=RETRY_AFTER_S,
        )
    this = (tasks.c.run_id == run_id, tasks.c.position == position * len(found) + number)
    return Draw(conn.execute(select(tasks).where(*this)).one(), number_of_pass)


@lru_cache(maxsize=8)
def _order_of_old_runs(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
