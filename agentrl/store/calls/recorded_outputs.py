"""The outputs of committed calls, as they were sampled: to answer a request again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from agentrl.store.tables import interaction_data, interactions


def of_calls(conn: Connection, call_ids: list[str]) -> dict[str, Any]:
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
