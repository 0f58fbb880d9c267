"""Sessions that go on, the oldest first, with what each waits for."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import Json
from agentrl.store.tables import interactions, sessions

MOST = 24
CALLS_SHOWN = 200
"""Calls of one session that a lane shows."""


def of_run(conn: Connection, run_id: str, most: int = MOST) -> tuple[int, list[Json]]:
    """How many sessions go on, and the oldest `most` of them with their calls."""
    going_on = (sessions.c.run_id == run_id, sessions.c.built.is_(False))
    n = conn.execute(select(func.count()).where(*going_on)).scalar_one()
    rows = conn.execute(
        select(sessions.c.id, sessions.c.status, sessions.c.is_eval, sessions.c.created_at, sessions.c.last_seen_at)
        .where(*going_on)
        .order_by(sessions.c.id)
        .limit(most)
    ).all()
    return n, lanes(conn, [dict(row._mapping) for row in rows])


def lanes(conn: Connection, rows: Sequence[Json]) -> list[Json]:
    """Sessions (`id`, `status`, `created_at`, …) with the times, versions and states of their calls."""
    calls: dict[str, list[Json]] = {row["id"]: [] for row in rows}
    c = interactions.c
    found = conn.execute(
        select(
            c.id, c.session_id, c.status, c.role, c.created_at, c.first_token_at, c.finished_at, c.min_version,
            c.max_version,
        )
        .where(c.session_id.in_(list(calls)))
        .order_by(c.session_id, c.id)
        .limit(CALLS_SHOWN * max(1, len(calls)))
    )  # fmt: skip
    for call in found:
        if len(calls[call.session_id]) < CALLS_SHOWN:
            calls[call.session_id].append(dict(call._mapping))
    return [row | {"calls": calls[row["id"]], "waits_for": waits_for(calls[row["id"]])} for row in rows]


def waits_for(calls: Sequence[Json]) -> str:
    """What an open session waits for: its model call, or its agent between calls."""
    if not calls:
        return "its first call"
    newest = calls[-1]
    if newest["status"] == "running":
        return "the first token" if newest["first_token_at"] is None else "the rest of an answer"
    return "its agent: tools, the reward, or the end"
