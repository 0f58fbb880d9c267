"""One model call: the intent row before it is sampled, the commit before it is delivered, the tree that they form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, bindparam, case, func, literal_column, select, update

from agentrl.domain.schemas import Delivery, ForkReason, InteractionStatus, Json, Role, SessionStatus, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.errors import RequestError, StoreError
from agentrl.store.db import bulk, codec
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.db.codec import Content
from agentrl.store.tables import contents, interaction_data, interactions, sessions

OF_THE_POLICY = (interactions.c.status == InteractionStatus.COMPLETE, interactions.c.role != Role.UPSTREAM)
"""Delivered calls that the policy answered: the nodes of token trees."""
STORE = "store"
"""The option of a call that asked to be left out of training and of AReaL's exports; then false."""
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
INSERT_DATA = bulk.insert(interaction_data)
# Whoever ends a session waits until the intents of its calls can be seen.
SELECT_OPEN = bulk.select(sessions, "id", where="status = 'open'", lock="SHARE")
SELECT_SEQ = bulk.select(sessions, "id", "seq", where="NOT built", lock="NO KEY UPDATE")
UPDATE_SESSION = bulk.update(
    sessions,
    "id",
    "seq",
    "last_seen_at",
    # The last call of an ended session is in: it is due.
    due_at=case((sessions.c.status == literal_column("'open'"), sessions.c.due_at), else_=bindparam("last_seen_at")),
)
UPDATE_FINISHED = bulk.update(
    interactions,
    "id",
    "status",
    "seq",
    "conversation_key",
    "output_tokens",
    "cached_tokens",
    "min_version",
    "max_version",
    "finish_reason",
    "engine_url",
    "first_token_at",
    "finished_at",
    "kv_mixed",
    "textless_key",
    where="status = 'running'",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What is known about a call before it is sampled."""

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
    options: Json | None = None  # what else was asked for
    request_id: str | None = None  # the first call of its request, where the request made several
    repeat_key: str | None = None  # hash of the request's Idempotency-Key; at the first call only
    messages: int = 0  # of the conversation, the answer included


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a call sampled. `output_ids` and `logprobs` have one length; `spans` cover it without gaps."""

    status: InteractionStatus
    conversation_key: bytes
    new_messages: list[Json]
    answer: Json
    prompt_delta_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    engine_url: str | None
    cached_tokens: int | None
    first_token_at: float | None
    top_logprobs: Json | list[Any] | None = None  # [[[logprob, id], …], …] for each output id, where asked for
    kv_mixed: bool = False  # sampled over keys and values that partly older weights computed
    textless_key: bytes | None = None  # of the conversation without the text of its answer, where that may be dropped

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.output_ids)} output ids but {len(self.logprobs)} logprobs")
        covered = 0
        for span in self.spans:
            if span.start != covered or span.end <= span.start:
                raise ValueError(f"version spans do not cover the output: {self.spans}")
            covered = span.end
        if covered != len(self.output_ids):
            raise ValueError(f"version spans cover {covered} of {len(self.output_ids)} output tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A delivered call in a session's token tree. It holds only what follows its parent's tokens."""

    id: str
    conversation_key: bytes
    parent: Node | None
    ids: TokenIds  # prompt and output, from the root on
    n_delta: int  # how many of its prompt's follow the parent's
    role: str
    system_hash: str | None
    tools_hash: str | None
    messages: int  # of the conversation, the answer included; 0 when unknown
    textless_key: bytes | None = None  # of a client that drops the answer's text
    text: str | None = None  # that text

    @property
    def own_ids(self) -> bytes:
        """Packed: what follows the parent's ids."""
        return self.ids.behind(len(self.parent.ids) if self.parent is not None else 0)

    @property
    def n_output(self) -> int:
        """How many of its ids were sampled by it."""
        return len(self.ids) - self.n_delta - (len(self.parent.ids) if self.parent is not None else 0)


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


def finish_many(conn: Connection, calls: Sequence[tuple[str, str, Outcome]]) -> list[int | Exception]:
    """`finish` for many calls at once, in four statements; one result per call, in order.

    Raises StoreError, having to be rolled back, when any of the intent rows is not running.
    """
    now = time.time()
    found = bulk.fetch(conn, SELECT_SEQ, {session_id for _, session_id, _ in calls})
    last_seq: dict[str, int] = {row[0]: row[1] for row in found}
    results: list[int | Exception] = []
    touched: dict[str, Json] = {}
    closed: list[Json] = []
    data: list[Json] = []
    for interaction_id, session_id, outcome in calls:
        if session_id not in last_seq:
            message = f"session {session_id} is sealed: it ended while this call ran"
            results.append(RequestError(409, message, code="session_sealed"))
            continue
        seq = last_seq[session_id] = last_seq[session_id] + 1
        touched[session_id] = {"key": session_id, "seq": seq, "last_seen_at": now}
        versions = [span.version for span in outcome.spans]
        closed.append(
            {
                "key": interaction_id,
                "status": outcome.status.value,
                "seq": seq,
                "conversation_key": outcome.conversation_key.hex(),
                "output_tokens": len(outcome.output_ids),
                "cached_tokens": outcome.cached_tokens,
                "min_version": min(versions, default=None),
                "max_version": max(versions, default=None),
                "finish_reason": outcome.finish_reason,
                "engine_url": outcome.engine_url,
                "first_token_at": outcome.first_token_at,
                "finished_at": now,
                "kv_mixed": outcome.kv_mixed,
                "textless_key": None if outcome.textless_key is None else outcome.textless_key.hex(),
            }
        )
        data.append(data_row(interaction_id, outcome))
        results.append(seq)
    bulk.run(conn, UPDATE_SESSION, list(touched.values()))
    if bulk.run(conn, UPDATE_FINISHED, closed) != len(closed):
        names = ", ".join(row["key"] for row in closed)
        raise StoreError(f"interaction {names} is not running: another proxy has declared it lost")
    bulk.run(conn, INSERT_DATA, data)
    return results


@bulk_unit(many=finish_many)
def finish(conn: Connection, interaction_id: str, session_id: str, outcome: Outcome) -> int:
    """Commit what was sampled; returns the session's new sequence number. After this the answer may be delivered.

    Raises RequestError 409 when the session was sealed meanwhile, StoreError when the intent row is not running.
    """
    return only(finish_many(conn, [(interaction_id, session_id, outcome)]))


def data_row(interaction_id: str, outcome: Outcome) -> Json:
    """The bulk columns of a finished call."""
    return {
        "interaction_id": interaction_id,
        "new_messages": codec.pack_json(outcome.new_messages),
        "answer": codec.pack_json(outcome.answer),
        "prompt_delta_ids": codec.pack_ids(outcome.prompt_delta_ids),
        "output_ids": codec.pack_ids(outcome.output_ids),
        "logprobs": codec.pack_logprobs(outcome.logprobs),
        "spans": codec.json_text([[s.version, s.start, s.end] for s in outcome.spans]),
        "top_logprobs": None if outcome.top_logprobs is None else codec.pack_json(outcome.top_logprobs),
    }


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
    """Somebody waits for the answer; those of other models are passed through, and not kept for retries."""
    if intent.role == Role.UPSTREAM:
        return {"delivery": Delivery.GIVEN.value, "holder": None}
    return {"delivery": Delivery.OPEN.value, "holder": intent.replica}


def fail(conn: Connection, interaction_id: str, status: InteractionStatus, error: str) -> None:
    """Close an intent row that has no answer."""
    now = time.time()
    of_call = select(interactions.c.session_id).where(interactions.c.id == interaction_id).scalar_subquery()
    conn.execute(  # its agent was heard of; an ended session need not wait for this call any more
        update(sessions)
        .where(sessions.c.id == of_call)
        .values(
            last_seen_at=now,
            due_at=case((sessions.c.status == SessionStatus.CLOSING, now), else_=sessions.c.due_at),
        )
    )
    conn.execute(
        update(interactions)
        .where(interactions.c.id == interaction_id, interactions.c.status == InteractionStatus.RUNNING)
        .values(status=status, error=codec.error_text(error), finished_at=now)
    )


def sums_up(conn: Connection, interaction_id: str) -> None:
    """The answer of this call begins a compacted conversation: that is why it did not extend another one."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id == interaction_id,
            interactions.c.fork_reason.in_((ForkReason.TOOLS_CHANGED, ForkReason.OTHER_AGENT)),
        )
        .values(fork_reason=ForkReason.SUMMARY)
    )


def declare_lost(conn: Connection, run_id: str, replica: str) -> int:
    """Calls that a dead proxy left running become `lost`; returns how many. A starting replica calls it for itself.

    Ended sessions that waited for them are due. The answers that its clients waited for may be claimed by retries.
    """
    now = time.time()
    running = (
        interactions.c.replica == replica,
        interactions.c.status == InteractionStatus.RUNNING,
        interactions.c.run_id == run_id,
    )
    conn.execute(
        update(sessions)
        .where(sessions.c.id.in_(select(interactions.c.session_id).where(*running)))
        .where(sessions.c.status == SessionStatus.CLOSING)
        .values(due_at=now)
    )
    result = conn.execute(
        update(interactions)
        .where(*running)
        .values(
            status=InteractionStatus.LOST, error="the proxy stopped before the answer was recorded", finished_at=now
        )
    )
    complete = interactions.c.status == InteractionStatus.COMPLETE
    conn.execute(
        update(interactions)
        .where(
            interactions.c.holder == replica, interactions.c.delivery == Delivery.OPEN, interactions.c.run_id == run_id
        )
        .values(delivery=case((complete, Delivery.UNSURE.value), else_=Delivery.FREE.value), holder=None)
    )
    return result.rowcount


def serving_replicas(conn: Connection, run_id: str) -> set[str]:
    """The proxies that have calls under way or clients that wait, dead or alive."""
    running = select(interactions.c.replica).where(
        interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
    )
    waiting = select(interactions.c.holder).where(
        interactions.c.delivery == Delivery.OPEN, interactions.c.run_id == run_id
    )
    return {name for query in (running, waiting) for name in conn.execute(query.distinct()).scalars() if name}


def load_tree(
    conn: Connection, session_id: str, after: int = 0, known: Mapping[str, Node] | None = None
) -> tuple[int, list[Node]]:
    """The session's sequence number and its delivered calls to the policy, oldest first: those numbered above `after`.

    `known` are the ones up to there, by id.
    """
    seq = conn.execute(select(sessions.c.seq).where(sessions.c.id == session_id)).scalar_one()
    rows = conn.execute(
        select(
            interactions.c.id,
            interactions.c.parent_id,
            interactions.c.conversation_key,
            interactions.c.role,
            interactions.c.system_hash,
            interactions.c.tools_hash,
            interactions.c.messages,
            interactions.c.textless_key,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.output_ids,
            case((interactions.c.textless_key.is_not(None), interaction_data.c.answer)).label("answer"),
        )
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.session_id == session_id, interactions.c.seq > after, *OF_THE_POLICY)
        .order_by(interactions.c.seq)
    )
    before, nodes = known or {}, dict[str, Node]()
    for row in rows:
        delta_ids: list[int] = codec.unpack_ids(row.prompt_delta_ids).tolist()
        own_ids = [*delta_ids, *codec.unpack_ids(row.output_ids).tolist()]
        parent = (nodes.get(row.parent_id) or before[row.parent_id]) if row.parent_id else None
        nodes[row.id] = Node(
            id=row.id,
            conversation_key=bytes.fromhex(row.conversation_key),
            parent=parent,
            ids=(parent.ids if parent else TokenIds()).extended(own_ids),
            n_delta=len(delta_ids),
            role=row.role,
            system_hash=row.system_hash,
            tools_hash=row.tools_hash,
            messages=row.messages,
            textless_key=None if row.textless_key is None else bytes.fromhex(row.textless_key),
            text=None if row.answer is None else codec.unpack_json(row.answer)["content"],
        )
    return int(seq), list(nodes.values())


def of_session(conn: Connection, session_id: str) -> list[Row[Any]]:
    """Every call of a session, in the order they were made."""
    return list(
        conn.execute(
            select(interactions).where(interactions.c.session_id == session_id).order_by(interactions.c.created_at)
        )
    )


def trace(conn: Connection, session_id: str) -> list[Json]:
    """The calls of a session with messages, ids, logprobs and version spans, for people and exports."""
    rows = conn.execute(
        select(interactions, interaction_data)
        .outerjoin(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.session_id == session_id)
        .order_by(interactions.c.created_at, interactions.c.id)
    ).all()
    shared = load_contents(conn, {key for row in rows for key in (row.system_hash, row.tools_hash) if key is not None})
    result: list[Json] = []
    for row in rows:
        item: Json = {
            "id": row.id,
            "parent_id": row.parent_id,
            "status": row.status,
            "role": row.role,
            "dialect": row.dialect,
            "fork_reason": row.fork_reason,
            "bridged": row.bridged,
            "finish_reason": row.finish_reason,
            "trainable": row.trainable,
            "options": row.options,
            "system": shared.get(row.system_hash, []),
            "tools": shared.get(row.tools_hash),
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "params": row.params,
            "digest": row.digest,
            "delivery": row.delivery,
            "distribution_modified": row.distribution_modified,
            "kv_mixed": row.kv_mixed,
            "error": row.error,
            "created_at": row.created_at,
            "finished_at": row.finished_at,
        }
        if row.output_ids is not None:
            item |= {
                "new_messages": codec.unpack_json(row.new_messages),
                "answer": codec.unpack_json(row.answer),
                "prompt_delta_ids": codec.unpack_ids(row.prompt_delta_ids).tolist(),
                "output_ids": codec.unpack_ids(row.output_ids).tolist(),
                "logprobs": codec.unpack_logprobs(row.logprobs).astype(np.float64).tolist(),
                "version_spans": row.spans,
            }
        result.append(item)
    return result


def load_contents(conn: Connection, hashes: Iterable[str]) -> dict[str | None, Any]:
    """What calls share (tools, system messages), by hash."""
    rows = conn.execute(select(contents.c.hash, contents.c.body).where(contents.c.hash.in_(list(hashes))))
    return {row.hash: codec.unpack_json(row.body) for row in rows}


def oldest_running(conn: Connection, run_id: str) -> float | None:
    """When the oldest of a run's calls under way began (seconds since the epoch); None when there is none."""
    oldest: float | None = conn.execute(
        select(func.min(interactions.c.created_at)).where(
            interactions.c.status == InteractionStatus.RUNNING, interactions.c.run_id == run_id
        )
    ).scalar_one()
    return oldest


def running_of(conn: Connection, run_id: str, replica: str, before: float) -> list[str]:
    """The calls of a replica that are under way and began before a time (seconds since the epoch)."""
    return list(
        conn.execute(
            select(interactions.c.id).where(
                interactions.c.replica == replica,
                interactions.c.status == InteractionStatus.RUNNING,
                interactions.c.run_id == run_id,
                interactions.c.created_at < before,
            )
        ).scalars()
    )
