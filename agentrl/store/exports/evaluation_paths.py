"""The root-to-leaf paths of ended evaluation sessions, as one sequence of token ids each, in pages."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, func, select

from agentrl.store.db.database import Database
from agentrl.store.exports import sampled_paths
from agentrl.store.exports.sampled_paths import SampledPath
from agentrl.store.tables import groups, sessions
from agentrl.store.training import returns

PAGE_SESSIONS = 64


def count_sessions(conn: Connection, run_id: str) -> int:
    """How many evaluation sessions a run has."""
    of_run = (sessions.c.run_id == run_id, sessions.c.is_eval.is_(True))
    return int(conn.execute(select(func.count()).select_from(sessions).where(*of_run)).scalar_one())


def pages(database: Database, run_id: str) -> Iterator[list[SampledPath]]:
    """Every path of every ended evaluation session."""
    after: str | None = ""
    while after is not None:
        page, after = database.query(_page, run_id, after)
        yield page


def _page(conn: Connection, run_id: str, after: str) -> tuple[list[SampledPath], str | None]:
    heads = conn.execute(
        select(sessions.c.id, sessions.c.status, sessions.c.sample_index, sessions.c.group_id, groups.c.task_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.run_id == run_id, sessions.c.is_eval.is_(True), sessions.c.id > after)
        .where(sessions.c.ended_at.is_not(None))
        .order_by(sessions.c.id)
        .limit(PAGE_SESSIONS)
    ).all()
    credited = returns.of_sessions(conn, [head.id for head in heads], 1.0)
    page = [
        path
        for head in heads
        for path in sampled_paths.of_session(
            conn, head, head.task_id or head.group_id, credited[head.id].episode_return
        )
    ]
    return page, heads[-1].id if heads else None
