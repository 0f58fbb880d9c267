"""The steps of a run, newest first."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import run_cards
from agentrl.store.views.results import step_rows


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """A page of steps: those that began before the step with the id `before`."""
    before = query.text("before")
    rows = step_rows.page(conn, run_id, before)
    return {
        "title": "Steps",
        "active": "Steps",
        "run": run_cards.one(conn, run_id),
        "rows": rows,
        "first": before is None,
        "more": rows[-1]["id"] if len(rows) == step_rows.PAGE else None,
    }
