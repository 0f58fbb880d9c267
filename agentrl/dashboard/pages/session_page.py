"""The pages of a session: its conversation, its calls one by one, its timeline, its lineage, its tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from agentrl.dashboard import call_command, session_contents, token_data
from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pictures import swimlanes
from agentrl.diagnosis import report, sources
from agentrl.diagnosis.record import Call
from agentrl.diagnosis.report import Report
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.store import Connection, runs
from agentrl.store.exports import token_rows
from agentrl.store.views import open_episodes, run_cards, session_place

TABS = ("conversation", "raw", "timeline", "lineage")
MOST_CALLS = 50
"""Calls of one page of the conversation."""


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The session under one of TABS; with `beside`, another session's conversation in a second column."""
    tab = query.choice("tab", *TABS) or "conversation"
    found = _head(conn, run_id, params["session"])
    made: Report = found["report"]
    tree = session_contents.tree(made)
    calls: list[Call] = [one["call"] for one in tree]
    first = min(query.integer("from") or 0, max(0, len(calls) - 1))
    shown = calls[first : first + MOST_CALLS]
    beside = query.text("beside")
    return {
        **found,
        "tab": tab,
        "tabs": TABS,
        "tree": tree,
        "forks": session_contents.forks_of(made),
        "turns": session_contents.turns(made.session, shown) if tab == "conversation" else [],
        "first": first,
        "next": first + MOST_CALLS if first + MOST_CALLS < len(calls) else None,
        "beside": _beside(conn, run_id, beside) if beside else None,
        "call": _chosen(calls, query.integer("call")) if tab == "raw" else None,
        "command": call_command,
        **(_timeline(conn, found["place"]) if tab == "timeline" else {}),
    }


def read_tokens(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The token view of one trajectory of the session: `trajectory`, else the first one."""
    found = _head(conn, run_id, params["session"])
    return {**found, "tab": "tokens", "tabs": TABS, "trajectory": _trajectory(found["place"], query)}


def token_arrays(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """What the token view shows of one trajectory."""
    place = session_place.of_session(conn, params["session"])
    trajectory = _trajectory(place, query)
    rows = [] if trajectory is None else token_rows.read(conn, run_id, [trajectory])
    return token_data.of(rows, sources.decoder(runs.get(conn, run_id).base_model))


def _head(conn: Connection, run_id: str, session_id: str) -> Json:
    """What every page of the session has."""
    place = session_place.of_session(conn, session_id)
    session, base_model = sources.of_session(conn, session_id)
    ids = [one["id"] for one in place["group"]]
    at = ids.index(session_id) if session_id in ids else None
    return {
        "title": session.title,
        "active": "",
        "run": run_cards.one(conn, run_id),
        "here": f"/ui/sessions/{session_id}",
        "place": place,
        "report": report.make(session, sources.decoder(base_model)),
        "previous": ids[at - 1] if at else None,
        "following": ids[at + 1] if at is not None and at + 1 < len(ids) else None,
    }


def _trajectory(place: Json, query: Query) -> str | None:
    """The chosen trajectory. Raises RequestError 404 for one of another session."""
    known = [one["id"] for one in place["trajectories"]]
    asked = query.text("trajectory")
    if asked is not None and asked not in known:
        raise RequestError(404, "the session has no such trajectory", code="trajectory_not_found")
    return asked or next(iter(known), None)


def _beside(conn: Connection, run_id: str, session_id: str) -> Json:
    if run_cards.id_of(conn, None, session_id) != run_id:
        raise RequestError(404, "beside: the run has no such session", code="session_not_found")
    session, base_model = sources.of_session(conn, session_id)
    made = report.make(session, sources.decoder(base_model))
    calls = [one["call"] for one in session_contents.tree(made)]
    return {"session": session, "turns": session_contents.turns(session, calls[:MOST_CALLS])}


def _chosen(calls: Sequence[Call], number: int | None) -> Call | None:
    """The call with this number, else the first. Raises RequestError 404."""
    if number is None:
        return calls[0] if calls else None
    found = next((call for call in calls if call.number == number), None)
    if found is None:
        raise RequestError(404, f"call: the session has no call {number}", code="call_not_found")
    return found


def _timeline(conn: Connection, place: Json) -> Json:
    """The calls as a lane, and the seconds until the first token, of decoding, and of the agent after it."""
    (lane,) = open_episodes.lanes(conn, [place])
    now = time.time()
    until = place["ended_at"] or now
    rows = []
    for call, following in zip(lane["calls"], [*lane["calls"][1:], None], strict=True):
        over = call["finished_at"]
        begins = following["created_at"] if following else until
        rows.append(
            call
            | {
                "to_first_token_s": call["first_token_at"] and call["first_token_at"] - call["created_at"],
                "decode_s": over and call["first_token_at"] and over - call["first_token_at"],
                "agent_s": over and max(0.0, begins - over),
            }
        )
    return {"swimlanes": swimlanes.drawn([lane], now, until=until), "timeline": rows}
