"""Commits the sampled output of a call, before its answer is delivered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, case, literal_column

from agentrl.domain.schemas import InteractionStatus, Json, VersionSpan
from agentrl.errors import RequestError, StoreError
from agentrl.store.calls import call_routing
from agentrl.store.db import bulk, codec, likeliest_codec
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.db.likeliest_codec import Rows
from agentrl.store.tables import interaction_data, interactions, sessions

INSERT_DATA = bulk.insert(interaction_data)
SELECT_SEQ = bulk.select(sessions, "id", "seq", where="NOT built", lock="NO KEY UPDATE")
UPDATE_SESSION = bulk.update(
    sessions,
    "id",
    "seq",
    "last_seen_at",
    # A call of an ended session has finished: the session is due for a check.
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
    "engine_backend",
    "engine_spans",
    "first_token_at",
    "finished_at",
    "kv_mixed",
    "textless_key",
    where="status = 'running'",
)


EngineSpan = tuple[str, str, int]
"""An engine's URL, its backend, and the index of the first token that it sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The sampled output of a call. `output_ids` and `logprobs` have one length; `spans` cover them without gaps."""

    status: InteractionStatus
    conversation_key: bytes
    new_messages: list[Json]
    answer: Json
    prompt_delta_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    engine_url: str | None  # of the engine that sampled the last token
    cached_tokens: int | None
    first_token_at: float | None
    top_logprobs: Rows | None = None  # of each output id, where asked for
    routing: Json | None = None  # `call_routing.row`, where asked for
    engine_backend: str | None = None
    engine_spans: list[EngineSpan] | None = None  # where several engines sampled it
    kv_mixed: bool = False  # the engine's KV cache partly came from older weights
    textless_key: bytes | None = None  # of the conversation without the answer's text, for clients that drop it

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


def finish_many(conn: Connection, calls: Sequence[tuple[str, str, Outcome]]) -> list[int | Exception]:
    """`finish` for many calls at once, in five statements; one result per call, in order.

    Raises StoreError when any of the intent rows is not running; the caller must roll back.
    """
    now = time.time()
    found = bulk.fetch(conn, SELECT_SEQ, {session_id for _, session_id, _ in calls})
    last_seq: dict[str, int] = {row[0]: row[1] for row in found}
    results: list[int | Exception] = []
    touched: dict[str, Json] = {}
    closed: list[Json] = []
    data: list[Json] = []
    routed: list[Json] = []
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
                "engine_backend": outcome.engine_backend,
                "engine_spans": None if outcome.engine_spans is None else codec.json_text(outcome.engine_spans),
                "first_token_at": outcome.first_token_at,
                "finished_at": now,
                "kv_mixed": outcome.kv_mixed,
                "textless_key": None if outcome.textless_key is None else outcome.textless_key.hex(),
            }
        )
        data.append(data_row(interaction_id, outcome))
        if outcome.routing is not None:
            routed.append(outcome.routing)
        results.append(seq)
    bulk.run(conn, UPDATE_SESSION, list(touched.values()))
    if bulk.run(conn, UPDATE_FINISHED, closed) != len(closed):
        names = ", ".join(row["key"] for row in closed)
        raise StoreError(f"interaction {names} is not running: another proxy has declared it lost")
    bulk.run(conn, INSERT_DATA, data)
    bulk.run(conn, call_routing.INSERT, routed)
    return results


@bulk_unit(many=finish_many)
def finish(conn: Connection, interaction_id: str, session_id: str, outcome: Outcome) -> int:
    """Commit the output of a call; returns the session's new sequence number. After this the answer may be delivered.

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
        "top_logprobs": None if outcome.top_logprobs is None else likeliest_codec.pack(outcome.top_logprobs),
    }
