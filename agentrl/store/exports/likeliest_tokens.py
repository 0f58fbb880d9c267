"""The likeliest tokens at the places of a trajectory, of those of its calls that recorded them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.store.db import likeliest_codec
from agentrl.store.tables import interaction_data, interactions, trajectory_interactions


def of_trajectories(conn: Connection, ids: Sequence[str]) -> dict[str, list[Json]]:
    """Trajectory → `{"start", "ids", "logprobs"}` of each call: the place of its first output token, and (T, K) arrays.
    Trajectories without any are left out.
    """
    rows = conn.execute(
        select(trajectory_interactions.c.trajectory_id, interactions.c.prompt_tokens, interaction_data.c.top_logprobs)
        .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(trajectory_interactions.c.trajectory_id.in_(ids), interaction_data.c.top_logprobs.is_not(None))
        .order_by(trajectory_interactions.c.trajectory_id, trajectory_interactions.c.position)
    )
    found: dict[str, list[Json]] = {}
    for row in rows:
        likeliest = likeliest_codec.unpack(row.top_logprobs)
        call = {"start": row.prompt_tokens, "ids": likeliest.ids, "logprobs": likeliest.logprobs}
        found.setdefault(row.trajectory_id, []).append(call)
    return found
