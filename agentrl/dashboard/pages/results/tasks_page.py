"""The tasks of a run: success over time, and which tasks are hard, never solved, or new."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_rendering import percent
from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pages.results import task_results
from agentrl.dashboard.pictures import curves
from agentrl.dashboard.pictures.curves import Point
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import run_cards
from agentrl.store.views.results import task_overview

PAGE = 50
WINDOWS = (2_000, 20_000)
"""How many of the newest groups are looked at."""


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The tasks of the newest groups, of one source if `source` is given, PAGE of them from `skip` on."""
    run = run_cards.one(conn, run_id)
    source, skip = query.text("source"), query.integer("skip") or 0
    order = query.choice("order", *task_results.ORDERS) or "hardest"
    window = int(query.choice("window", *map(str, WINDOWS)) or WINDOWS[0])
    success = task_overview.success_of(run["settings"])
    groups = task_overview.newest(conn, run_id, window, success)
    found = task_results.by_task(groups, source, order)
    shown = found[skip : skip + PAGE]
    series = task_results.over_time([group for group in groups if source in (None, group.source)])
    return {
        "title": "Tasks",
        "active": "Tasks",
        "run": run,
        "success": success,
        "groups": len(groups),
        "newest_place": groups[0].cursor if groups else 0,
        "sources": task_results.sources(groups),
        "chosen": {"source": source, "order": None if order == "hardest" else order, "window": _unless_default(window)},
        "order": order,
        "orders": list(task_results.ORDERS),
        "window": window,
        "windows": WINDOWS,
        "found": len(found),
        "rows": shown,
        "data": task_overview.data_of(conn, [task.task_id for task in shown]),
        "skip": skip,
        "more": skip + PAGE if len(found) > skip + PAGE else None,
        "names": list(series),
        "curves": curves.drawn(
            {
                name: [Point(x, y, said=f"{name}: {percent(y)} near place {x:,.0f} of the data") for x, y in points]
                for name, points in series.items()
            },
            "Success over time",
        ),
    }


def _unless_default(window: int) -> int | None:
    return None if window == WINDOWS[0] else window
