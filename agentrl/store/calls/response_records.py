"""Stored responses of the Responses API: delivered calls that clients may refer to until they are deleted."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from agentrl.store.calls import conversations
from agentrl.store.calls.conversations import Conversation
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.tables import interactions

ASKED = "response"
"""The option that holds a response's request fields besides its conversation."""


def find(conn: Connection, session_id: str, call_id: str) -> Conversation | None:
    """A response of the session."""
    found = conversations.of_session(conn, session_id).get(call_id)
    return found if found is not None and ASKED in found.options else None


def delete(conn: Connection, session_id: str, call_id: str) -> bool:
    """Delete a response; its call stays, with messages and tokens. False for an unknown response."""
    columns = interactions.c
    row = conn.execute(
        select(columns.options).where(columns.id == call_id, columns.session_id == session_id, *OF_THE_POLICY)
    ).first()
    if row is None or ASKED not in (row.options or {}):
        return False
    kept = {name: value for name, value in row.options.items() if name != ASKED}
    conn.execute(update(interactions).where(columns.id == call_id).values(options=kept))
    return True
