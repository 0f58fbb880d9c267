"""What happened in a run, when, and for how long: events, sessions and calls, in pages of their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Column, Connection, Row, Select, func, select

from agentrl.store.db.database import Database
from agentrl.store.tables import events, groups, interactions, sessions

PAGE_ROWS = 5_000
Page = list[Row[Any]]


def of_events(database: Database, run_id: str) -> Iterator[Page]:
    """The run's events: id, kind, source, data, created_at."""
    return _pages(database, select(events).where(events.c.run_id == run_id), events.c.id)


def of_sessions(database: Database, run_id: str) -> Iterator[Page]:
    """The run's sessions, with their start, end, group and worker."""
    statement = (
        select(
            sessions.c.id,
            sessions.c.group_id,
            sessions.c.sample_index,
            sessions.c.is_eval,
            sessions.c.status,
            sessions.c.error,
            sessions.c.created_at,
            sessions.c.ended_at,
            groups.c.owner,
        )
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.run_id == run_id)
    )
    return _pages(database, statement, sessions.c.id)


def of_calls(database: Database, run_id: str) -> Iterator[Page]:
    """The run's calls: when they began, had their first token and ended, on which engine."""
    c = interactions.c
    statement = select(
        c.id,
        c.session_id,
        c.engine_url,
        c.role,
        c.status,
        c.min_version,
        c.max_version,
        c.prompt_tokens,
        c.cached_tokens,
        c.output_tokens,
        c.fork_reason,
        c.created_at,
        c.first_token_at,
        c.finished_at,
    ).where(c.run_id == run_id)
    return _pages(database, statement, c.id)


def count(conn: Connection, run_id: str) -> int:
    """How many rows the pages have."""
    return sum(
        int(conn.execute(select(func.count()).select_from(table).where(table.c.run_id == run_id)).scalar_one())
        for table in (events, sessions, interactions)
    )


def _pages(database: Database, statement: Select[Any], key: Column[str]) -> Iterator[Page]:
    after = ""
    while page := database.query(_page, statement, key, after):
        yield page
        after = page[-1].id


def _page(conn: Connection, statement: Select[Any], key: Column[str], after: str) -> Page:
    return list(conn.execute(statement.where(key > after).order_by(key).limit(PAGE_ROWS)))
