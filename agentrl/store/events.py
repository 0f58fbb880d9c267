"""A run's timeline."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, select
from sqlalchemy.dialects import postgresql, sqlite

from agentrl.schemas import Json
from agentrl.store.codec import new_id
from agentrl.tables import events


def record(conn: Connection, run_id: str, kind: str, data: Json, source: str, event_id: str | None = None) -> None:
    """Append one event. Who may have to repeat it names its id beforehand (`codec.new_id`): it is stored once."""
    insert = sqlite.insert if conn.dialect.name == "sqlite" else postgresql.insert
    event = {"id": event_id or new_id(), "run_id": run_id, "kind": kind, "source": source, "data": data}
    conn.execute(insert(events).values(**event, created_at=time.time()).on_conflict_do_nothing())


def of_run(conn: Connection, run_id: str, kind: str | None = None) -> list[Row[Any]]:
    """Events of a run, oldest first."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.id)
    return list(conn.execute(query if kind is None else query.where(events.c.kind == kind)))
