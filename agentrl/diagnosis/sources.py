"""Reads a session from the store or from a proxy, and loads the tokenizer for its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from agentrl.client import AsyncClient
from agentrl.diagnosis.record import Session, read
from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError, UserError
from agentrl.store import Connection, Database, events, family, runs
from agentrl.store.calls import call_traces
from agentrl.store.sessions import session_lookup
from agentrl.store.training import rewards


def from_store(database: Database, session_id: str) -> tuple[Session, str]:
    """A session and the folder of its run's base model. Raises UserError for an unknown session."""
    found = database.query(_known, session_id)
    if found is None:
        raise UserError(f"--session: the database has no session {session_id!r}")
    return found


def of_session(conn: Connection, session_id: str) -> tuple[Session, str]:
    """`from_store` in a transaction, for a session that exists."""
    found = _known(conn, session_id)
    assert found is not None
    return found


async def from_proxy(client: AsyncClient, session_id: str) -> Session:
    """A session with its sub-agents, from `GET /sessions/{id}/trace` and `…/refusals`. Raises RequestError."""
    trace = await client.request("GET", f"/sessions/{session_id}/trace")
    refused = await client.request("GET", f"/sessions/{session_id}/refusals")
    below = [await from_proxy(client, child) for child in trace["children"]]
    return read(trace, trace["calls"], refused, below)


def _known(conn: Connection, session_id: str) -> tuple[Session, str] | None:
    row = session_lookup.get(conn, session_id)
    if row is None:
        return None
    return _session(conn, session_id), str(runs.get(conn, row.run_id).base_model)


def _session(conn: Connection, session_id: str) -> Session:
    row = session_lookup.get(conn, session_id)
    assert row is not None
    summary: Json = {
        "session_id": row.id,
        "parent_session_id": row.parent_session_id,
        "metadata": row.metadata,
        "status": row.status,
        "is_eval": row.is_eval,
        "error": row.error,
        "rewards": rewards.history(conn, row.id),
    }
    refused = events.refusals(conn, row.run_id, row.id)
    below = [_session(conn, child) for child in family.children(conn, row.id)]
    return read(summary, call_traces.trace(conn, row.id), refused, below)


@cache
def decoder(model: str | None) -> Callable[[Sequence[int]], str] | None:
    """A function that decodes ids with the model's tokenizer; None when its folder is not on this machine."""
    from agentrl.rendering import load_renderer

    if model is None or not Path(model).is_dir():
        return None
    try:
        return load_renderer(Path(model)).decode
    except ModelFolderError:
        return None
