"""Sessions of a run by text, return, fork, tool, status and error."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.domain.schemas import ForkReason, Json
from agentrl.store import Connection
from agentrl.store.views import run_cards, session_search
from agentrl.store.views.session_search import Wanted

FILTERS = ("text", "tool", "low", "high", "fork", "status", "error", "kind")
FORKS = tuple(reason.value for reason in ForkReason)
KINDS = {"training": False, "evaluation": True}


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The sessions that match the filters, older than session `before`."""
    kind = query.choice("kind", *KINDS)
    wanted = Wanted(
        text=query.text("text"),
        tool=query.text("tool"),
        fork=query.choice("fork", *FORKS),
        status=query.choice("status", *session_search.STATUSES),
        error=query.text("error"),
        low=query.number("low"),
        high=query.number("high"),
        is_eval=None if kind is None else KINDS[kind],
    )
    before = query.text("before")
    found = session_search.of_run(conn, run_id, wanted, before)
    given = {name: query.text(name) for name in FILTERS}
    return {
        "title": "Search",
        "active": "Search",
        "run": run_cards.one(conn, run_id),
        "given": {name: value or "" for name, value in given.items()},
        "is_filtered": any(given.values()),
        "before": before,
        "found": found,
        "older": given | {"before": found.before} if found.before else None,
        "forks": FORKS,
        "statuses": tuple(session_search.STATUSES),
        "kinds": tuple(KINDS),
    }
