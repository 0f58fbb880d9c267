"""The samples of one band of the flow: which sessions they are, and why they are there."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection, sample_flow
from agentrl.store.views import band_rows, run_cards


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """Rows of one band and reason, older than `before`."""
    flow = sample_flow.of_run(conn, run_id)
    band = query.choice("band", *band_rows.BANDS) or "trained"
    reason = query.text("reason")
    rows = band_rows.of_band(conn, run_id, band, reason, query.text("before"))
    return {
        "title": f"Samples: {band}" + (f", {reason}" if reason else ""),
        "run": run_cards.one(conn, run_id),
        "flow": flow,
        "band": band,
        "reason": reason,
        "rows": rows,
        "more": rows[-1]["id"] if len(rows) == band_rows.PAGE else None,
    }
