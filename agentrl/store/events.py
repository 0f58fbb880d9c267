"""A run's timeline."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from agentrl.schemas import Json
from agentrl.store.codec import new_id
from agentrl.tables import events


def record(conn: Connection, run_id: str, kind: str, data: Json, source: str) -> None:
    """Append one event."""
    conn.execute(
        insert(events).values(id=new_id(), run_id=run_id, kind=kind, source=source, data=data, created_at=time.time())
    )


def of_run(conn: Connection, run_id: str, kind: str | None = None) -> list[Row[Any]]:
    """Events of a run, oldest first."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.id)
    return list(conn.execute(query if kind is None else query.where(events.c.kind == kind)))
