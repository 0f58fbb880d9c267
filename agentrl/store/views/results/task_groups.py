"""The groups of one task over time, newest first, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import Json
from agentrl.store.tables import groups, tasks
from agentrl.store.views.results import group_episodes

PAGE = 30
G = groups.c
COLUMNS = (G.id, G.task_id, G.cursor, G.state, G.reject_reason, G.size, G.missing, G.created_at, G.finished_at)


def task(conn: Connection, run_id: str, task_id: str) -> Row[Any] | None:
    """A task of the run: id, position, data."""
    return conn.execute(select(tasks).where(tasks.c.id == task_id, tasks.c.run_id == run_id)).first()


def page(conn: Connection, task_id: str, before: int | None = None) -> list[Json]:
    """PAGE groups with their episodes: those at places of the data before the place `before`, if given."""
    query = select(*COLUMNS).where(G.task_id == task_id).order_by(G.cursor.desc()).limit(PAGE)
    return _told(conn, query if before is None else query.where(G.cursor < before))


def chosen(conn: Connection, task_id: str, group_ids: Sequence[str]) -> list[Json]:
    """These groups of the task, in the order given; the others are left out."""
    found = {one["id"]: one for one in _told(conn, select(*COLUMNS).where(G.task_id == task_id, G.id.in_(group_ids)))}
    return [found[group_id] for group_id in group_ids if group_id in found]


def _told(conn: Connection, query: Any) -> list[Json]:
    rows = [dict(row._mapping) for row in conn.execute(query)]
    ids = [row["id"] for row in rows]
    episodes, steps = group_episodes.of_groups(conn, ids), group_episodes.step_of(conn, ids)
    return [row | {"episodes": episodes[row["id"]], "step": steps.get(row["id"])} for row in rows]
