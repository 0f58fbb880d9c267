"""Trajectories: the root-to-leaf paths of an ended session, and their tokens as the loss needs them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from agentrl.domain.batches.outline import Outline, joined
from agentrl.domain.schemas import Json, TrajectoryState, TrajectoryTokens
from agentrl.domain.verdicts import Verdict
from agentrl.store import family
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.db.codec import new_id
from agentrl.store.tables import interactions, sessions, trajectories, trajectory_interactions
from agentrl.store.training import returns, session_verdicts
from agentrl.store.training.paths import path_outlines, path_tokens
from agentrl.store.training.returns import Rescore, SessionReturns

LONGEST_REASON = 100
"""Characters of the column."""
BASELINE = "baseline"
"""The reason of a trajectory of a greedy session, which is never trained."""


def paths(parents: Mapping[str, str | None]) -> list[list[str]]:
    """Root-to-leaf paths of a forest given as node → parent in order of creation; oldest leaf first."""
    inner = set(parents.values())
    return [path_to(leaf, parents) for leaf in parents if leaf not in inner]


def path_to(node: str, parents: Mapping[str, str | None]) -> list[str]:
    """The path from the root to a node."""
    path = [node]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]


def build(conn: Connection, session: Row[Any], discount: float) -> int:
    """Insert the trajectories of a session; returns how many. The first of several paths that share an output owns it.

    A path is rejected at once when the session is a baseline, when it has no reward, when its agent rejected it, or
    when the path owns no trainable token.
    """
    calls = {
        row.id: row
        for row in conn.execute(
            select(interactions)
            .where(interactions.c.session_id == session.id, *OF_THE_POLICY)
            .order_by(interactions.c.seq)
        )
    }
    credited = returns.of_sessions(conn, [session.id], discount)[session.id]
    verdict = session_verdicts.of_sessions(conn, [session.id])[session.id]
    spans = path_outlines.recorded_spans(conn, [row.id for row in calls.values() if _is_divided(row, verdict)])
    owned_already: set[str] = set()
    found = paths({row.id: row.parent_id for row in calls.values()})
    for path in found:
        owned = [calls[i] for i in path if i not in owned_already]
        owned_already.update(path)
        trajectory_id, leaf = new_id(), calls[path[-1]]
        conn.execute(
            insert(trajectories).values(
                {
                    "id": trajectory_id,
                    "run_id": session.run_id,
                    "group_id": session.group_id,
                    "session_id": session.id,
                    "leaf_id": leaf.id,
                    "tokens": leaf.prompt_tokens + leaf.output_tokens,
                    "created_at": time.time(),
                    **worth(owned, credited, verdict, spans, is_baseline=session.is_baseline),
                }
            )
        )
        owned_ids = {row.id for row in owned}
        conn.execute(
            insert(trajectory_interactions),
            [
                {
                    "trajectory_id": trajectory_id,
                    "position": i,
                    "interaction_id": call_id,
                    "owned": call_id in owned_ids,
                }
                for i, call_id in enumerate(path)
            ],
        )
    return len(found)


def refresh(conn: Connection, session_id: str, discount: float) -> None:
    """Apply a new reward to the trajectories of a built session and of its sub-agents, before the group is leased.

    This changes returns, makes trajectories ready that were rejected for a missing reward, and makes a rewarded side
    call trainable.
    """
    members = [session_id, *family.ids_below(conn, session_id)]
    owned: dict[tuple[str, str], list[Row[Any]]] = {}
    for row in conn.execute(
        select(trajectories.c.id.label("trajectory_id"), sessions.c.is_baseline, interactions)
        .join(trajectory_interactions, trajectory_interactions.c.trajectory_id == trajectories.c.id)
        .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .where(trajectories.c.session_id.in_(members), trajectory_interactions.c.owned.is_(True))
    ):
        owned.setdefault((row.session_id, row.trajectory_id), []).append(row)
    credited = returns.of_sessions(conn, members, discount)
    found = session_verdicts.of_sessions(conn, members)
    divided = [row.id for (sid, _), rows in owned.items() for row in rows if _is_divided(row, found[sid])]
    spans = path_outlines.recorded_spans(conn, divided)
    for (sid, trajectory_id), calls in owned.items():
        values = worth(calls, credited[sid], found[sid], spans, is_baseline=calls[0].is_baseline)
        conn.execute(update(trajectories).where(trajectories.c.id == trajectory_id).values(values))


def _is_divided(call: Any, verdict: Verdict) -> bool:
    """Whether a part of a call trains, and several versions sampled the call."""
    return verdict.ranges is not None and call.id in verdict.ranges and call.min_version != call.max_version


def worth(
    owned: Sequence[Any],
    credited: SessionReturns,
    verdict: Verdict,
    spans: Mapping[str, Sequence[Sequence[int]]],
    *,
    is_baseline: bool = False,
) -> Json:
    """The columns of a trajectory that follow from applied rewards and the session's verdict: return, trainable tokens,
    versions of these tokens, state, reason.

    `owned` are the calls whose outputs the trajectory owns. `spans` has the version spans of a call if several versions
    sampled it and only a part of it trains.
    """
    trained = [
        row for row in owned if row.trainable and verdict.count(row.id, row.output_tokens) and row.id in credited.calls
    ]
    versions: set[int] = set()
    for row in trained:
        whole = [(version, 0, row.output_tokens) for version in (row.min_version, row.max_version)]
        versions |= verdict.versions(row.id, spans.get(row.id, whole))
    reason = None
    if is_baseline:
        reason = BASELINE
    elif not trained:
        reason = "no_trainable_tokens"
    elif verdict.rejected is not None:
        reason = rejected(verdict.rejected)
    elif not credited.rewarded:
        reason = "no_reward"
    return {
        "trainable_tokens": sum(verdict.count(row.id, row.output_tokens) for row in trained),
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        "return": credited.episode_return,
        "state": TrajectoryState.REJECTED if reason else TrajectoryState.READY,
        "reason": reason,
    }


def rejected(reason: str) -> str:
    """The reason of a trajectory whose agent rejected it."""
    return f"rejected: {reason}"[:LONGEST_REASON]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Trajectories, the ages of the versions that sampled them, and how many tokens were too old to train."""

    trajectories: list[TrajectoryTokens]
    ages: dict[int, int]
    wasted_tokens: int


def load(
    conn: Connection,
    trajectory_ids: Sequence[str],
    *,
    ages: Mapping[int, int],
    discount: float,
    stale: Set[str] = frozenset(),
    rescore: Rescore | None = None,
    routing: bool = False,
) -> Loaded:
    """Tokens, masks and returns of trajectories, in the order given.

    `ages` maps the weight versions that are young enough to their ages. Tokens of other versions are masked out of the
    loss, and so is every token of a trajectory in `stale`. `routing` loads the recorded experts too. Raises ValueError
    and LookupError for recorded data that do not belong together.
    """
    outlines = path_outlines.read(conn, trajectory_ids, ages=ages, discount=discount, stale=stale, rescore=rescore)
    return Loaded(
        trajectories=with_tokens(conn, outlines, routing=routing),
        ages=ages_in(outlines, ages),
        wasted_tokens=sum(one.wasted_tokens for one in outlines),
    )


def with_tokens(conn: Connection, outlines: Sequence[Outline], *, routing: bool) -> list[TrajectoryTokens]:
    """Trajectories with their tokens."""
    by_id = {one.trajectory_id: one for one in outlines}
    return [
        joined(by_id[tid], tokens)
        for chunk in path_tokens.chunks({one.trajectory_id: one.length for one in outlines})
        for tid, tokens in path_tokens.read(conn, {tid: by_id[tid].calls for tid in chunk}, routing=routing).items()
    ]


def ages_in(outlines: Sequence[Outline], ages: Mapping[int, int]) -> dict[int, int]:
    """The ages of the versions that sampled some trajectories."""
    seen = {version for one in outlines for version in one.sampled[:, 1].tolist()}
    return {version: age for version, age in ages.items() if version in seen}
