"""The columns behind the charts of a run, as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard import run_memory
from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import step_series


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The metrics of the steps after step `after`, and the evaluations."""
    found = step_series.of_run(conn, run_id, query.integer("after") or 0)
    return {**found, "evaluations": run_memory.evaluations(conn, run_id)}
