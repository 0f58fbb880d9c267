"""The experts that engines chose for a call's positions: written with its outcome, joined along a path of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from agentrl.domain.experts.routed_experts import CallRouting, RoutedExperts, RouteOrigin, mark_recomputed
from agentrl.domain.schemas import Int32, Json
from agentrl.store.db import bulk, experts_codec
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import routed_experts, trajectory_interactions

INSERT = bulk.insert(routed_experts)


def row(interaction_id: str, routing: CallRouting) -> Json:
    """The columns of a call's routing."""
    counts = routing.experts.counts()
    return {
        "interaction_id": interaction_id,
        "start": routing.start,
        "computed_from": routing.computed_from,
        "recorded": counts[RouteOrigin.RECORDED],
        "recomputed": counts[RouteOrigin.RECOMPUTED],
        "missing": counts[RouteOrigin.MISSING],
        "data": experts_codec.pack(routing.experts),
    }


def of_trajectories(conn: Connection, lengths: Mapping[str, int]) -> dict[str, RoutedExperts]:
    """Trajectory → the experts at its positions, for trajectories given with their lengths; those whose calls recorded
    none are left out. Raises ValueError as `of_path` does.
    """
    t = trajectory_interactions.c
    recorded = (
        select(t.trajectory_id, routed_experts)
        .join(routed_experts, routed_experts.c.interaction_id == t.interaction_id)
        .order_by(t.trajectory_id, t.position)
    )
    return {
        name: of_path([_call(row) for row in rows], lengths[name])
        for ids in parts(lengths)
        for name, rows in groupby(
            conn.execute(recorded.where(t.trajectory_id.in_(ids))), key=lambda row: str(row.trajectory_id)
        )
    }


def origins_of(conn: Connection, trajectory_id: str, length: int) -> Int32 | None:
    """The RouteOrigin of each position of a trajectory; None where none of its calls recorded experts."""
    found = of_trajectories(conn, {trajectory_id: length}).get(trajectory_id)
    return None if found is None else found.origins.astype(np.int32)


def _call(row: Any) -> CallRouting:
    return CallRouting(start=row.start, computed_from=row.computed_from, experts=experts_codec.unpack(row.data))


def of_path(calls: Sequence[CallRouting], length: int) -> RoutedExperts:
    """The experts at the `length` positions of a path, from those of its calls that recorded them, in order.

    Positions of the other calls are MISSING, and so is the last position, which no engine has computed. A position that
    a later call's passes computed again is RECOMPUTED: some of the path's tokens were sampled after another choice than
    the one that is recorded. Raises ValueError when calls recorded models of different shapes.
    """
    first = calls[0].experts.ids
    _, layers, top_k = first.shape
    joined = RoutedExperts.missing(length, layers, top_k, first.dtype)
    for call in calls:
        own, end = call.experts, call.start + len(call.experts)
        if own.ids.shape[1:] != first.shape[1:] or end > length:
            raise ValueError(f"experts {own.ids.shape} from {call.start} on, in a path of {joined.ids.shape}")
        mark_recomputed(joined.origins[call.computed_from : call.start])
        joined.ids[call.start : end] = own.ids
        joined.origins[call.start : end] = own.origins
    return joined
