"""The root-to-leaf paths of ended evaluation sessions, as one sequence of token ids each, in pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import Int32, InteractionStatus
from agentrl.store.db import codec
from agentrl.store.db.database import Database
from agentrl.store.tables import groups, interaction_data, interactions, sessions
from agentrl.store.training import returns
from agentrl.store.training import trajectories as paths

PAGE_SESSIONS = 64


@dataclass(frozen=True, slots=True)
class SampledPath:
    """One path, or one trajectory. `head_version` and `tail_version` sampled its first and last token."""

    task_id: str  # of an outside program's session, its group's id
    sample_index: int
    ids: Int32  # (T,) the whole sequence
    prompt_len: int  # ids before the first sampled one
    head_version: int
    tail_version: int
    reward: float


def count_sessions(conn: Connection, run_id: str) -> int:
    """How many evaluation sessions a run has."""
    of_run = (sessions.c.run_id == run_id, sessions.c.is_eval.is_(True))
    return int(conn.execute(select(func.count()).select_from(sessions).where(*of_run)).scalar_one())


def pages(database: Database, run_id: str) -> Iterator[list[SampledPath]]:
    """Every path of every ended evaluation session."""
    after: str | None = ""
    while after is not None:
        page, after = database.query(_page, run_id, after)
        yield page


def _page(conn: Connection, run_id: str, after: str) -> tuple[list[SampledPath], str | None]:
    heads = conn.execute(
        select(sessions.c.id, sessions.c.sample_index, sessions.c.group_id, groups.c.task_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.run_id == run_id, sessions.c.is_eval.is_(True), sessions.c.id > after)
        .where(sessions.c.ended_at.is_not(None))
        .order_by(sessions.c.id)
        .limit(PAGE_SESSIONS)
    ).all()
    credited = returns.of_sessions(conn, [head.id for head in heads], 1.0)
    page = [path for head in heads for path in _of_session(conn, head, credited[head.id].episode_return)]
    return page, heads[-1].id if heads else None


def _of_session(conn: Connection, head: Any, reward: float) -> Iterator[SampledPath]:
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
            .where(interactions.c.session_id == head.id, interactions.c.status == InteractionStatus.COMPLETE)
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
                task_id=head.task_id or head.group_id,
                sample_index=head.sample_index,
                ids=np.concatenate(pieces),
                prompt_len=sum(len(piece) for piece in pieces[: 2 * first + 1]),
                head_version=spans[0][0],
                tail_version=spans[-1][0],
                reward=reward,
            )
