"""The page of a run: is it learning, is it honest, who waits for whom, where did the samples go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from agentrl.dashboard import run_advice, run_memory
from agentrl.dashboard.page_rendering import query as address
from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pictures import sankey, swimlanes
from agentrl.domain.schemas import Json
from agentrl.store import Connection, engine_claims, events, sample_flow
from agentrl.store.views import open_episodes, recent_faults, run_cards, step_series

STEPS = 500
"""Newest steps that the advice looks at."""
EVENTS = 12


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The run at this moment."""
    run = run_cards.one(conn, run_id)
    flow = sample_flow.of_run(conn, run_id)
    n_open, lanes = open_episodes.of_run(conn, run_id)
    engines = engine_claims.of_run(conn, run_id)
    series = step_series.of_run(conn, run_id, newest=STEPS)
    evaluations = run_memory.evaluations(conn, run_id)
    notes = run_advice.of_run(run, recent_faults.of_run(conn, run_id), engines, flow, series, evaluations)
    here = f"/ui/runs/{run['name']}"
    return {
        "title": run["name"],
        "run": run,
        "now": time.time(),
        "notes": [asdict(note) for note in notes],
        "flow": flow,
        "sankey": sankey.drawn(flow, lambda band, reason: address(f"{here}/samples", {"band": band, "reason": reason})),
        "open": n_open,
        "lanes": lanes,
        "swimlanes": swimlanes.drawn(lanes, time.time()),
        "engines": engines,
        "latest": {name: values[-1] for name, values in series["metrics"].items()},
        "steps": series["step"],
        "events": [dict(row._mapping) for row in events.newest(conn, run_id, EVENTS)],
    }
