"""Reads ended sessions and their calls for spans: no token arrays, and messages only where they are asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, select

from agentrl.domain import credit
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.db.database import Database
from agentrl.store.tables import groups, interaction_data, interactions, rewards, sessions, trajectories

PAGE_SESSIONS = 64
PAGE_CALLS = 256
PAGE_CONTENTS = 16
"""Calls of a page with messages, whose sizes only the proxy's limit of a request bounds."""
Rewards = dict[str, float]
"""Name → the value that counts."""


@dataclass(frozen=True, slots=True)
class TracedSession:
    """A session, its place and its outcome."""

    row: Any  # of `sessions`, with task_id and cursor of its group
    rewards: dict[str | None, Rewards]  # of each call; None: of the session
    episode_return: float | None
    states: list[str]  # of its trajectories, in order
    calls: Any  # of its calls: count, prompt_tokens, output_tokens, min_version, max_version


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call; its messages where they were asked for and the store has them."""

    row: Any
    system: list[Any] = field(default_factory=list)
    new_messages: list[Any] | None = None
    answer: Any = None


def read(conn: Connection, session_ids: Sequence[str]) -> list[TracedSession]:
    """The sessions that are stored, in the order of their ids."""
    rows = conn.execute(
        select(sessions, groups.c.task_id, groups.c.cursor)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id.in_(session_ids))
        .order_by(sessions.c.id)
    ).all()
    given, built, totals = _rewards(conn, session_ids), _trajectories(conn, session_ids), _totals(conn, session_ids)
    return [
        TracedSession(
            row=row,
            rewards=given[row.id],
            episode_return=next((found.episode_return for found in built[row.id]), None),
            states=[found.state for found in built[row.id]],
            calls=totals.get(row.id),
        )
        for row in rows
    ]


def calls(database: Database, session_id: str, *, contents: bool) -> Iterator[TracedCall]:
    """The calls of a session in the order in which they were made, read in pages."""
    after, most = "", PAGE_CONTENTS if contents else PAGE_CALLS
    while page := database.query(_calls, session_id, after, most, contents):
        yield from page
        after = page[-1].row.id


def pages(database: Database, run_id: str) -> Iterator[list[str]]:
    """The ids of the run's built sessions, in pages."""
    after = ""
    while page := database.query(_page, run_id, after):
        yield page
        after = page[-1]


def count(conn: Connection, run_id: str) -> int:
    """How many sessions the pages have."""
    built = select(func.count()).select_from(sessions).where(sessions.c.run_id == run_id, sessions.c.built.is_(True))
    return int(conn.execute(built).scalar_one())


def _page(conn: Connection, run_id: str, after: str) -> list[str]:
    c = sessions.c
    built = select(c.id).where(c.run_id == run_id, c.built.is_(True), c.id > after)
    return list(conn.execute(built.order_by(c.id).limit(PAGE_SESSIONS)).scalars())


def _rewards(conn: Connection, session_ids: Sequence[str]) -> dict[str, dict[str | None, Rewards]]:
    """Session → call or None → the sum of the newest values of each name."""
    c = rewards.c
    facts: dict[str, list[tuple[str | None, str, str, float]]] = defaultdict(list)
    for row in conn.execute(
        select(c.session_id, c.interaction_id, c.scope, c.name, c.value)
        .where(c.session_id.in_(session_ids), c.applied.is_(True))
        .order_by(c.id)
    ):
        facts[row.session_id].append((row.interaction_id, row.scope, row.name, row.value))
    found: dict[str, dict[str | None, Rewards]] = defaultdict(dict)
    for session_id, of_session in facts.items():
        for (call_id, _, name), value in credit.newest(of_session).items():
            of_call = found[session_id].setdefault(call_id, {})
            of_call[name] = of_call.get(name, 0.0) + value
    return found


def _trajectories(conn: Connection, session_ids: Sequence[str]) -> dict[str, list[Any]]:
    c = trajectories.c
    found: dict[str, list[Any]] = defaultdict(list)
    columns = (c.session_id, c.state, c["return"].label("episode_return"))
    for row in conn.execute(select(*columns).where(c.session_id.in_(session_ids)).order_by(c.id)):
        found[row.session_id].append(row)
    return found


def _totals(conn: Connection, session_ids: Sequence[str]) -> dict[str, Row[Any]]:
    c = interactions.c
    rows = conn.execute(
        select(
            c.session_id,
            func.count().label("count"),
            func.sum(c.prompt_tokens).label("prompt_tokens"),
            func.sum(c.output_tokens).label("output_tokens"),
            func.min(c.min_version).label("min_version"),
            func.max(c.max_version).label("max_version"),
        )
        .where(c.session_id.in_(session_ids))
        .group_by(c.session_id)
    )
    return {row.session_id: row for row in rows}


def _calls(conn: Connection, session_id: str, after: str, most: int, contents: bool) -> list[TracedCall]:
    c, data = interactions.c, interaction_data.c
    query = select(interactions, *((data.new_messages, data.answer) if contents else ()))
    if contents:
        query = query.outerjoin(interaction_data, data.interaction_id == c.id)
    rows = conn.execute(query.where(c.session_id == session_id, c.id > after).order_by(c.id).limit(most)).all()
    if not contents:
        return [TracedCall(row) for row in rows]
    shared = load_contents(conn, {row.system_hash for row in rows if row.system_hash is not None})
    return [
        TracedCall(
            row=row,
            system=shared.get(row.system_hash) or [],
            new_messages=None if row.new_messages is None else codec.unpack_json(row.new_messages),
            answer=None if row.answer is None else codec.unpack_json(row.answer),
        )
        for row in rows
    ]
