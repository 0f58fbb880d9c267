"""Reads the calls of a session, for people and for exports."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import Json
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions


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


def outputs(conn: Connection, call_ids: list[str]) -> dict[str, Any]:
    """Each call's answer, token ids, logprobs, version spans and finish reason, by the call's id."""
    rows = conn.execute(
        select(
            interactions.c.id,
            interactions.c.created_at,
            interactions.c.output_tokens,
            interactions.c.cached_tokens,
            interactions.c.finish_reason,
            interaction_data.c.answer,
            interaction_data.c.output_ids,
            interaction_data.c.logprobs,
            interaction_data.c.spans,
            interaction_data.c.top_logprobs,
        )
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.id.in_(call_ids))
    )
    return {str(row.id): row for row in rows.all()}
