"""How the tasks of a run go: the newest groups of its own data, each with the returns of its episodes in one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Integer, String, case, cast, func, select

from agentrl.domain.schemas import Json
from agentrl.domain.ties import TIE
from agentrl.store import task_rows
from agentrl.store.tables import groups, sessions, tasks, trajectories
from agentrl.store.training.batch_facts import SOURCE_KEYS
from agentrl.store.training.trajectories import BASELINE

SUCCESS = 1.0
"""The least return of a success, unless the run's curriculum gives another one."""


@dataclass(frozen=True, slots=True)
class OfGroup:
    """A group of a task: its place in the run's data, and its episodes that have a return."""

    task_id: str
    cursor: int
    source: str | None
    episodes: int
    successes: int
    mean: float
    best: float


def newest(conn: Connection, run_id: str, most: int, success: float) -> list[OfGroup]:
    """The newest `most` groups, newest first, without those that have no return yet."""
    recent = (
        select(groups.c.id, groups.c.task_id, groups.c.cursor)
        .where(groups.c.run_id == run_id, groups.c.cursor.is_not(None), groups.c.task_id.is_not(None))
        .order_by(groups.c.cursor.desc())
        .limit(most)
        .cte("recent")
    )
    paths = select(recent.c.id, trajectories.c.session_id, func.max(trajectories.c["return"]).label("value")).join(
        trajectories, trajectories.c.group_id == recent.c.id
    )
    paths = paths.where(trajectories.c.reason.is_distinct_from(BASELINE))  # a greedy episode is no sample
    if _has_children(conn, run_id):  # an episode with sub-agents counts once
        paths = paths.join(sessions, sessions.c.id == trajectories.c.session_id).where(
            sessions.c.parent_session_id.is_(None)
        )
    episode = paths.group_by(recent.c.id, trajectories.c.session_id).subquery()
    won = func.sum(cast(case((episode.c.value >= success - TIE, 1), else_=0), Integer))
    found = (
        select(
            episode.c.id,
            func.count(episode.c.value).label("episodes"),
            won.label("successes"),
            func.avg(episode.c.value).label("mean"),
            func.max(episode.c.value).label("best"),
        )
        .where(episode.c.value.is_not(None))
        .group_by(episode.c.id)
        .subquery()
    )
    names = [source.name for source in task_rows.sources(conn, run_id)]
    rows = conn.execute(
        select(
            recent.c.task_id, recent.c.cursor, tasks.c.position, _named().label("source"), found.c.episodes,
            found.c.successes, found.c.mean, found.c.best,
        )
        .join(found, found.c.id == recent.c.id)
        .join(tasks, tasks.c.id == recent.c.task_id)
        .order_by(recent.c.cursor.desc())
    )  # fmt: skip
    return [
        OfGroup(
            row.task_id, row.cursor, row.source or _of_position(names, row.position), row.episodes,
            int(row.successes), float(row.mean), float(row.best),
        )
        for row in rows
    ]  # fmt: skip


def data_of(conn: Connection, task_ids: list[str]) -> dict[str, Json]:
    """Task → its data."""
    return {row.id: row.data for row in conn.execute(select(tasks.c.id, tasks.c.data).where(tasks.c.id.in_(task_ids)))}


def success_of(config: Json) -> float:
    """The least return of a success, of a run with this configuration."""
    curriculum = (config.get("rollout") or {}).get("curriculum") or {}
    return float(curriculum.get("success", SUCCESS))


def _named() -> Any:
    """The source that a task's data names, or null."""
    return func.coalesce(*(cast(tasks.c.data[key].as_string(), String) for key in SOURCE_KEYS))


def _of_position(names: list[str], position: int) -> str | None:
    return names[position % len(names)] if len(names) > 1 else None


def _has_children(conn: Connection, run_id: str) -> bool:
    child = select(sessions.c.id).where(sessions.c.parent_session_id.is_not(None), sessions.c.run_id == run_id)
    return conn.execute(child.limit(1)).first() is not None
