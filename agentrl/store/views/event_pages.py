"""The events of a run, newest first, a page at a time, perhaps of one kind; and the kinds that there are."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import Json
from agentrl.store.tables import events

PAGE, MOST_KINDS = 50, 60


def page(conn: Connection, run_id: str, kind: str | None, before: str | None = None) -> list[Json]:
    """PAGE events: those older than the event with the id `before`, if given."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.id.desc()).limit(PAGE)
    if kind is not None:
        query = query.where(events.c.kind == kind)
    if before is not None:
        query = query.where(events.c.id < before)
    return [dict(row._mapping) for row in conn.execute(query)]


def kinds(conn: Connection, run_id: str) -> list[str]:
    """The kinds of the run's events in order of their names: one look into the index for each, not for each event."""
    found: list[str] = []
    next_one = select(func.min(events.c.kind)).where(events.c.run_id == run_id)
    kind = conn.execute(next_one).scalar()
    while kind is not None and len(found) < MOST_KINDS:
        found.append(str(kind))
        kind = conn.execute(next_one.where(events.c.kind > kind)).scalar()
    return found
