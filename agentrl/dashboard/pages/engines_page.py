"""The engines of a run, how versions reached them, and the processes beside them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import engine_load, run_cards

SILENT_S = 60.0
"""A replica or worker that was not seen for this long is marked."""

OF_AN_ENGINE = ("stall_s", "stall_steps", "transport", "verified", "unverified")
"""The facts of a publish that the page shows for each engine."""


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """Engines, publishes and processes at this moment."""
    run = run_cards.one(conn, run_id)
    settings = run["settings"].get("proxy") or {}
    return {
        "title": "Engines",
        "active": "Engines",
        "run": run,
        "now": time.time(),
        "silent_s": float(settings.get("heartbeat_timeout_s", SILENT_S)),
        "engines": engine_load.engines(conn, run_id),
        "backends": engine_load.mismatch(conn, run_id, "backend"),
        "compared": engine_load.COMPARED_STEPS,
        "unassigned": engine_load.unassigned(conn, run_id),
        "calls": engine_load.CALLS,
        "publishes": [_told(facts) for facts in engine_load.publishes(conn, run_id)],
        "replicas": engine_load.replicas(conn, run_id),
        "processes": engine_load.processes(conn, run_id),
    }


def _told(facts: Json) -> Json:
    """A publish: its seconds, and a row for each engine. Facts may be one value for all engines, or one for each."""
    by_engine = {name: facts[name] for name in OF_AN_ENGINE if name in facts}
    urls = sorted({url for value in by_engine.values() if isinstance(value, dict) for url in value})
    start, end = facts.get("start"), facts.get("end")
    return {
        "version": facts.get("version"),
        "at": facts["at"],
        "took": end - start if isinstance(start, (int, float)) and isinstance(end, (int, float)) else None,
        "bytes": facts.get("bytes"),
        "engines": [{"url": url, **{name: _of(value, url) for name, value in by_engine.items()}} for url in urls]
        or [{"url": f"{facts.get('engines', 'all')} engines", **by_engine}],
    }


def _of(value: Any, url: str) -> Any:
    return value.get(url) if isinstance(value, dict) else value
