"""A session as its clients and the dashboard see it."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json, Role
from agentrl.errors import no_session
from agentrl.store import family
from agentrl.store.calls import call_traces
from agentrl.store.sessions import session_lookup
from agentrl.store.sessions.ends import roles
from agentrl.store.tables import sessions
from agentrl.store.training import rewards


def of_session(conn: Connection, session_id: str) -> Json:
    """A session's status, calls and rewards. Raises RequestError 404."""
    row = session_lookup.get(conn, session_id)
    if row is None:
        raise no_session(session_id)
    calls = call_traces.of_session(conn, session_id)
    return {
        "session_id": row.id,
        "run_id": row.run_id,
        "group_id": row.group_id,
        "parent_session_id": row.parent_session_id,
        "children": family.children(conn, session_id),
        "name": row.name,
        "sample_index": row.sample_index,
        "status": row.status,
        "is_eval": row.is_eval,
        "is_baseline": row.is_baseline,
        "metadata": row.metadata,
        "error": row.error,
        "answer": row.answer,
        "stats": row.stats or {},
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "interactions": len(calls),
        "forks": [call.fork_reason for call in calls if call.fork_reason],
        "rewards": rewards.history(conn, session_id),
    }


def with_calls(conn: Connection, session_id: str) -> Json:
    """`of_session`, with the row of every call. Raises RequestError 404."""
    calls = call_traces.of_session(conn, session_id)
    return {**of_session(conn, session_id), "calls": [dict(call._mapping) for call in calls]}


def with_trace(conn: Connection, session_id: str) -> Json:
    """`of_session`, with every call's messages, token ids, logprobs and version spans. Roles are those that the calls
    have if the session ends now. Raises RequestError 404.
    """
    found = {**of_session(conn, session_id), "calls": call_traces.trace(conn, session_id)}
    is_built = conn.execute(select(sessions.c.built).where(sessions.c.id == session_id)).scalar_one()
    side = set() if is_built else roles.side_at_end(conn, session_id)
    for call in found["calls"]:
        if call["id"] in side:
            call["role"] = Role.SIDE
    return found
