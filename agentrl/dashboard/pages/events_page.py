"""The timeline of a run, newest first."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import event_pages, run_cards


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """A page of events, only those of one kind if `kind` is given, older than the event with the id `before`."""
    kind, before = query.text("kind"), query.text("before")
    rows = [row | {"told": _told(row["data"])} for row in event_pages.page(conn, run_id, kind, before)]
    return {
        "title": "Events",
        "active": "Events",
        "run": run_cards.one(conn, run_id),
        "kinds": event_pages.kinds(conn, run_id),
        "kind": kind,
        "rows": rows,
        "first": before is None,
        "more": rows[-1]["id"] if len(rows) == event_pages.PAGE else None,
    }


def _told(data: Json) -> Json:
    """The facts without the times, which have columns of their own; all of them if there are no others."""
    return {name: value for name, value in data.items() if name not in ("start", "end")} or data
