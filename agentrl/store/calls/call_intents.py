"""Writes the intent row of a call before it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from agentrl.domain.schemas import Delivery, InteractionStatus, Json, Role
from agentrl.errors import RequestError
from agentrl.store.db import bulk, codec
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.db.codec import Content
from agentrl.store.tables import contents, interactions, sessions

INSERT_CONTENT = bulk.insert_new(contents)
INSERT_INTENT = bulk.insert(
    interactions,
    "id",
    "run_id",
    "session_id",
    "parent_id",
    "dialect",
    "status",
    "role",
    "digest",
    "replica",
    "request_id",
    "repeat_key",
    "delivery",
    "holder",
    "params",
    "temperature",
    "system_hash",
    "tools_hash",
    "options",
    "messages",
    "fork_reason",
    "bridged",
    "distribution_modified",
    "kv_mixed",
    "trainable",
    "prompt_tokens",
    "prompt_digest",
    "output_tokens",
    "created_at",
)
# The lock makes a transaction that ends the session wait until this intent is committed.
SELECT_OPEN = bulk.select(sessions, "id", where="status = 'open'", lock="SHARE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """The facts of a call that are known before it is sampled."""

    id: str
    run_id: str
    session_id: str
    parent_id: str | None
    dialect: str
    role: str
    digest: str
    replica: str
    params: Json
    temperature: float
    tools: Content | None
    fork_reason: str | None
    bridged: bool
    distribution_modified: bool
    trainable: bool
    prompt_tokens: int
    prompt_digest: str  # `TokenIds.digest` of what the engine gets
    created_at: float
    system: Content | None = None  # the messages that the conversation begins with
    options: Json | None = None  # other options of the request
    request_id: str | None = None  # the first call of its request, where the request made several
    repeat_key: str | None = None  # hash of the request's Idempotency-Key; at the first call only
    messages: int = 0  # of the conversation, the answer included


def begin_many(conn: Connection, calls: Sequence[tuple[Intent]]) -> list[Exception | None]:
    """`begin` for many calls at once, in three statements; one result per call, in order."""
    intents = [intent for (intent,) in calls]
    takes_calls = {row[0] for row in bulk.fetch(conn, SELECT_OPEN, {intent.session_id for intent in intents})}
    results: list[Exception | None] = []
    rows: list[Json] = []
    bodies: dict[str, bytes] = {}
    for intent in intents:
        if intent.session_id not in takes_calls:
            message = f"session {intent.session_id} is sealed: it has ended"
            results.append(RequestError(409, message, code="session_sealed"))
            continue
        bodies |= {c.hash: c.body for c in (intent.system, intent.tools) if c is not None and c.body is not None}
        rows.append(intent_row(intent))
        results.append(None)
    bulk.run(conn, INSERT_CONTENT, [{"hash": key, "body": body} for key, body in sorted(bodies.items())])
    bulk.run(conn, INSERT_INTENT, rows)
    return results


@bulk_unit(many=begin_many)
def begin(conn: Connection, intent: Intent) -> None:
    """Write the intent row. Raises RequestError 409 when the session no longer takes calls."""
    only(begin_many(conn, [(intent,)]))


def begin_all(conn: Connection, intents: Sequence[Intent]) -> None:
    """`begin` for all of them or for none. Raises RequestError as `begin` does."""
    for result in begin_many(conn, [(intent,) for intent in intents]):
        if result is not None:
            raise result


def intent_row(intent: Intent) -> Json:
    """The columns of a call that has begun."""
    return {
        "id": intent.id,
        "run_id": intent.run_id,
        "session_id": intent.session_id,
        "parent_id": intent.parent_id,
        "dialect": intent.dialect,
        "status": InteractionStatus.RUNNING.value,
        "role": intent.role,
        "digest": intent.digest,
        "request_id": intent.request_id,
        "repeat_key": intent.repeat_key,
        "replica": intent.replica,
        **_delivery(intent),
        "params": codec.json_text(intent.params),
        "temperature": intent.temperature,
        "system_hash": intent.system and intent.system.hash,
        "tools_hash": intent.tools and intent.tools.hash,
        "options": None if intent.options is None else codec.json_text(intent.options),
        "messages": intent.messages,
        "fork_reason": intent.fork_reason,
        "bridged": intent.bridged,
        "distribution_modified": intent.distribution_modified,
        "kv_mixed": False,
        "trainable": intent.trainable,
        "prompt_tokens": intent.prompt_tokens,
        "prompt_digest": intent.prompt_digest,
        "output_tokens": 0,
        "created_at": intent.created_at,
    }


def _delivery(intent: Intent) -> Json:
    """The delivery columns: a client waits for the answer. Answers of other models are not kept for retries."""
    if intent.role == Role.UPSTREAM:
        return {"delivery": Delivery.GIVEN.value, "holder": None}
    return {"delivery": Delivery.OPEN.value, "holder": intent.replica}
