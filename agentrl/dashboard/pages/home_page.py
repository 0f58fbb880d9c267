"""The first page: the runs."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import run_cards


def read(conn: Connection, run_id: str | None, params: Mapping[str, str], query: Query) -> Json:
    """The cards of the runs that the viewer may see."""
    return {"title": "Runs", "run": None, "cards": run_cards.every(conn, run_id)}
