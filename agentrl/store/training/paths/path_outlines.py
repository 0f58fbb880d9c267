"""Reads outlines of trajectories: lengths, versions, loss tokens and returns, without any token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from agentrl.domain.batches.outline import Outline
from agentrl.domain.schemas import Int32
from agentrl.domain.verdicts import Verdict
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import interaction_data, interactions, trajectories, trajectory_interactions
from agentrl.store.training import returns, session_verdicts
from agentrl.store.training.returns import Rescore, SessionReturns


def read(
    conn: Connection,
    trajectory_ids: Sequence[str],
    *,
    ages: Mapping[int, int],
    discount: float,
    stale: Set[str] = frozenset(),
    rescore: Rescore | None = None,
) -> list[Outline]:
    """The outlines of trajectories, in the order given.

    `ages` has the weight versions that are young enough. Tokens of other versions are no loss tokens, and neither is
    any token of a trajectory in `stale`. Raises LookupError for a trajectory without calls.
    """
    by_id: dict[str, list[Any]] = {tid: [] for tid in trajectory_ids}
    for row in _calls(conn, trajectory_ids):
        by_id[row.trajectory_id].append(row)
    spans = _spans(conn, by_id)
    sessions_of = {tid: str(turns[0].session_id) for tid, turns in by_id.items()}
    session_ids = sorted(set(sessions_of.values()))
    credited, verdicts = _of_sessions(conn, session_ids, discount, rescore)
    baselines: dict[str, float] = {}
    for ids in parts(sorted({str(turns[0].group_id) for turns in by_id.values()})):
        baselines |= returns.of_baselines(conn, ids, discount, rescore)
    return [
        outline(
            by_id[tid],
            spans,
            credited[sid],
            verdicts[sid],
            set() if tid in stale else ages.keys(),
            baselines.get(by_id[tid][0].group_id),
        )
        for tid, sid in sessions_of.items()
    ]


def _calls(conn: Connection, trajectory_ids: Sequence[str]) -> Iterator[Any]:
    for ids in parts(trajectory_ids):
        yield from conn.execute(
            select(
                trajectories.c.id.label("trajectory_id"),
                trajectories.c.session_id,
                trajectories.c.group_id,
                trajectory_interactions.c.owned,
                interactions.c.id.label("interaction_id"),
                interactions.c.trainable,
                interactions.c.temperature,
                interactions.c.kv_mixed,
                interactions.c.prompt_tokens,
                interactions.c.prompt_digest,
                interactions.c.output_tokens,
                interactions.c.min_version,
                interactions.c.max_version,
                interactions.c.finish_reason,
            )
            .join(trajectory_interactions, trajectory_interactions.c.trajectory_id == trajectories.c.id)
            .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
            .where(trajectories.c.id.in_(ids))
            .order_by(trajectories.c.id, trajectory_interactions.c.position)
        )


def _spans(conn: Connection, by_id: Mapping[str, Sequence[Any]]) -> dict[str, list[tuple[int, int, int]]]:
    """Call → its version spans, which need a look at its data only where several versions sampled it."""
    calls = {row.interaction_id: row for turns in by_id.values() for row in turns}
    found = {
        call_id: [(row.min_version, 0, row.output_tokens)] if row.output_tokens else []
        for call_id, row in calls.items()
        if row.min_version == row.max_version
    }
    return found | recorded_spans(conn, [call_id for call_id in calls if call_id not in found])


def recorded_spans(conn: Connection, call_ids: Iterable[str]) -> dict[str, list[tuple[int, int, int]]]:
    """Call → the version spans of its output, as they were recorded."""
    data = interaction_data.c
    return {
        row.interaction_id: row.spans
        for ids in parts(call_ids)
        for row in conn.execute(select(data.interaction_id, data.spans).where(data.interaction_id.in_(ids)))
    }


def _of_sessions(
    conn: Connection, session_ids: Sequence[str], discount: float, rescore: Rescore | None
) -> tuple[dict[str, SessionReturns], dict[str, Verdict]]:
    credited: dict[str, SessionReturns] = {}
    verdicts: dict[str, Verdict] = {}
    for ids in parts(session_ids):
        credited |= returns.of_sessions(conn, ids, discount, rescore)
        verdicts |= session_verdicts.of_sessions(conn, ids)
    return credited, verdicts


def outline(
    turns: Sequence[Any],
    spans: Mapping[str, Sequence[Sequence[int]]],
    credited: SessionReturns,
    verdict: Verdict,
    young: Set[int],
    baseline: float | None = None,
) -> Outline:
    """One trajectory; `turns` are rows as `read` reads them, `spans` has the version spans of each call's output, and
    `baseline` is the return of its group's greedy episode.
    """
    outputs, sampled, trained, wasted = [], [], [], 0
    for position, turn in enumerate(turns):
        start, of_call = turn.prompt_tokens, spans[turn.interaction_id]
        outputs.append((start, start + turn.output_tokens))
        sampled += [(position, version, start + first, start + last) for version, first, last in of_call]
        if turn.owned and turn.trainable and turn.interaction_id in credited.calls:
            for version, first, last in verdict.within(turn.interaction_id, of_call):
                if version in young:
                    trained.append((position, version, start + first, start + last))
                else:
                    wasted += last - first
    return Outline(
        trajectory_id=turns[0].trajectory_id,
        session_id=turns[0].session_id,
        episode_id=credited.episode_id,
        group_id=turns[0].group_id,
        calls=tuple(turn.interaction_id for turn in turns),
        prompts=tuple(turn.prompt_digest for turn in turns),
        outputs=np.array(outputs, np.int32).reshape(-1, 2),
        temperatures=np.array([turn.temperature for turn in turns], np.float32),
        kv_mixed=np.array([turn.kv_mixed for turn in turns], np.bool_),
        sampled=_rows(sampled),
        trained=_rows(trained),
        turn_returns=np.array([credited.calls.get(turn.interaction_id, 0.0) for turn in turns], np.float64),
        episode_return=credited.episode_return,
        named_returns=credited.named,
        wasted_tokens=wasted,
        truncated=_is_truncated(turns[-1], credited, verdict),
        greedy_return=baseline,
    )


def _is_truncated(leaf: Any, credited: SessionReturns, verdict: Verdict) -> bool:
    """Whether the path ends with its episode, and a limit ended that: the last answer reached its length limit, or the
    agent said so.
    """
    return leaf.interaction_id == credited.last and (leaf.finish_reason == "length" or verdict.truncated)


def _rows(found: Sequence[tuple[int, int, int, int]]) -> Int32:
    """In the order of their positions; verdicts list ranges of one span after those of another."""
    return np.array(sorted(found, key=lambda row: row[2]), np.int32).reshape(-1, 4)
