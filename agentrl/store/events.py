"""The timeline of a run: events, append-only."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import Json
from agentrl.store.db import upsert
from agentrl.store.db.codec import new_id
from agentrl.store.tables import events

REOPENED = "reopened"
"""Kind of the event that records the resume of a run. Only later failures count."""
TRAINER_STARTED = "trainer_started"
"""Kind of the event that records the start of a trainer: its device, and what settings that are `auto` mean there."""
REFUSED = "refused"
"""Kind of the events that record refused calls of a session."""
REFUSALS_KEPT = 20
"""Maximum number of refusals that one proxy process records of a session."""


def record(conn: Connection, run_id: str, kind: str, data: Json, source: str, event_id: str | None = None) -> None:
    """Append one event. A caller that may repeat it passes an id (`codec.new_id`), so that it is stored once."""
    event = {"id": event_id or new_id(), "run_id": run_id, "kind": kind, "source": source, "data": data}
    conn.execute(upsert.insert(conn, events).values(**event, created_at=time.time()).on_conflict_do_nothing())


def of_run(conn: Connection, run_id: str, kind: str | None = None) -> list[Row[Any]]:
    """Events of a run, oldest first."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.id)
    return list(conn.execute(query if kind is None else query.where(events.c.kind == kind)))


def newest(conn: Connection, run_id: str, most: int) -> list[Row[Any]]:
    """The newest events of a run, newest first."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.id.desc()).limit(most)
    return list(conn.execute(query))


def newest_of(conn: Connection, run_id: str, kind: str) -> Row[Any] | None:
    """The newest event of one kind; None without any."""
    query = select(events).where(events.c.run_id == run_id, events.c.kind == kind)
    return conn.execute(query.order_by(events.c.id.desc()).limit(1)).first()


def refusals(conn: Connection, run_id: str, session_id: str) -> list[Json]:
    """The refused calls of a session, oldest first: status, code, param, message, route, at."""
    of_session = events.c.data["session_id"].as_string() == session_id
    query = select(events.c.data).where(events.c.run_id == run_id, events.c.kind == REFUSED, of_session)
    return [data for (data,) in conn.execute(query.order_by(events.c.id))]
