"""The root-to-leaf paths of a session's recorded calls, as one sequence of token ids each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from agentrl.domain.schemas import Int32
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions
from agentrl.store.training import trajectories as paths


@dataclass(frozen=True, slots=True)
class SampledPath:
    """One path, or one trajectory. `head_version` and `tail_version` sampled its first and last token."""

    session_id: str
    status: str  # of the session
    task_id: str  # of an outside program's session, its group's id
    sample_index: int
    ids: Int32  # (T,) the whole sequence
    prompt_len: int  # ids before the first sampled one
    head_version: int
    tail_version: int
    reward: float


def of_session(conn: Connection, session: Any, task_id: str, reward: float) -> Iterator[SampledPath]:
    """The paths of a session, oldest first; `session` has its `id`, `status` and `sample_index`."""
    calls = {
        row.id: row
        for row in conn.execute(
            select(
                interactions.c.id,
                interactions.c.parent_id,
                interaction_data.c.prompt_delta_ids,
                interaction_data.c.output_ids,
                interaction_data.c.spans,
            )
            .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
            .where(interactions.c.session_id == session.id, *OF_THE_POLICY)
            .order_by(interactions.c.seq)
        )
    }
    for path in paths.paths({row.id: row.parent_id for row in calls.values()}):
        turns = [calls[call_id] for call_id in path]
        spans: list[list[int]] = [span for turn in turns for span in turn.spans]
        if spans:
            pieces = [codec.unpack_ids(part) for turn in turns for part in (turn.prompt_delta_ids, turn.output_ids)]
            first = next(i for i, turn in enumerate(turns) if turn.spans)
            yield SampledPath(
                session_id=session.id,
                status=session.status,
                task_id=task_id,
                sample_index=session.sample_index,
                ids=np.concatenate(pieces),
                prompt_len=sum(len(piece) for piece in pieces[: 2 * first + 1]),
                head_version=spans[0][0],
                tail_version=spans[-1][0],
                reward=reward,
            )
