"""Reads conversations: each call stores only its new messages, so a conversation is assembled along its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A delivered call's whole conversation, its answer last. `options` are the call's own."""

    call_id: str
    role: str
    system: list[Json]  # the system messages at its start
    messages: list[Json]  # all other messages
    tools: list[Json] | None
    options: Mapping[str, Any]
    finish: str | None = None  # why its answer ended

    @property
    def all(self) -> list[Json]:
        """Every message."""
        return [*self.system, *self.messages]


def of_session(conn: Connection, session_id: str) -> dict[str, Conversation]:
    """The conversations of every delivered call to the policy, by call, oldest first."""
    rows = conn.execute(
        select(
            interactions.c.id,
            interactions.c.parent_id,
            interactions.c.system_hash,
            interactions.c.tools_hash,
            interactions.c.role,
            interactions.c.options,
            interactions.c.finish_reason,
            interaction_data.c.new_messages,
            interaction_data.c.answer,
        )
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.session_id == session_id, *OF_THE_POLICY)
        .order_by(interactions.c.seq)
    ).all()
    shared = load_contents(conn, {key for row in rows for key in (row.system_hash, row.tools_hash) if key is not None})
    found: dict[str, Conversation] = {}
    for row in rows:
        before = found[row.parent_id].messages if row.parent_id else []
        found[row.id] = Conversation(
            call_id=row.id,
            role=row.role,
            system=shared.get(row.system_hash, []),
            tools=shared.get(row.tools_hash),
            messages=[*before, *codec.unpack_json(row.new_messages), codec.unpack_json(row.answer)],
            options=row.options or {},
            finish=row.finish_reason,
        )
    return found


@dataclass(frozen=True, slots=True)
class History:
    """A session's conversations, oldest first: those that have an answer, and those whose first call still runs."""

    recorded: list[Conversation]
    under_way: list[Conversation]
    any: bool = True  # false: the session has made no call yet


def history(conn: Connection, session_id: str) -> History:
    """The session's conversations, to decide why a call forks. A session without calls costs one look-up."""
    if not has_calls(conn, session_id):
        return History([], [], any=False)
    return History(list(of_session(conn, session_id).values()), running(conn, session_id))


def has_calls(conn: Connection, session_id: str) -> bool:
    """Whether the session has made a call."""
    return (
        conn.execute(select(interactions.c.id).where(interactions.c.session_id == session_id).limit(1)).first()
        is not None
    )


def running(conn: Connection, session_id: str) -> list[Conversation]:
    """The conversations that running calls to the policy begin, without their messages."""
    columns = interactions.c
    rows = conn.execute(
        select(columns.id, columns.system_hash, columns.tools_hash, columns.role, columns.options)
        .where(
            columns.session_id == session_id,
            columns.parent_id.is_(None),
            columns.role != Role.UPSTREAM,
            columns.status == InteractionStatus.RUNNING,
        )
        .order_by(columns.created_at, columns.id)
    ).all()
    shared = load_contents(conn, {key for row in rows for key in (row.system_hash, row.tools_hash) if key is not None})
    return [
        Conversation(
            call_id=row.id,
            role=row.role,
            system=shared.get(row.system_hash, []),
            tools=shared.get(row.tools_hash),
            messages=[],
            options=row.options or {},
        )
        for row in rows
    ]
