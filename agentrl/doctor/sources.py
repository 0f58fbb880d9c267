"""Where a session is read: the store, or a proxy by HTTP. And the tokenizer that spells its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from sqlalchemy import Connection

from agentrl.doctor.record import Session, read
from agentrl.errors import ModelFolderError, UserError
from agentrl.schemas import Json
from agentrl.store import Database, events, interactions, rewards, runs, sessions


def from_store(database: Database, session_id: str) -> tuple[Session, str]:
    """A session and the folder of its run's base model. Raises UserError for a session that the store does not know."""
    return database.query(_from_store, session_id)


def _from_store(conn: Connection, session_id: str) -> tuple[Session, str]:
    row = sessions.get(conn, session_id)
    if row is None:
        raise UserError(f"--session: the database holds no session {session_id!r}")
    summary: Json = {
        "session_id": row.id, "status": row.status, "is_eval": row.is_eval, "error": row.error,
        "rewards": rewards.history(conn, session_id), "children": sessions.children(conn, session_id),
    }  # fmt: skip
    base_model = str(runs.get(conn, row.run_id).base_model)
    refused = events.refusals(conn, row.run_id, session_id)
    return read(summary, interactions.trace(conn, session_id), refused), base_model


def from_trace(trace: Json, refusals: list[Json]) -> Session:
    """A session from the answers of `GET /sessions/{id}/trace` and `…/refusals`."""
    return read(trace, trace["calls"], refusals)


@cache
def decoder(model: str | None) -> Callable[[Sequence[int]], str] | None:
    """How the model's tokenizer spells ids; None where its folder is not on this machine."""
    from agentrl.rendering import load_renderer

    if model is None or not Path(model).is_dir():
        return None
    try:
        return load_renderer(Path(model)).decode
    except ModelFolderError:
        return None
