"""Trajectories: the root-to-leaf paths of an ended session, and their tokens as the loss needs them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, insert, select, update

from agentrl.domain.schemas import PROMPT_VERSION, Json, TrajectoryState, TrajectoryTokens
from agentrl.domain.verdicts import Verdict
from agentrl.store import family
from agentrl.store.calls import call_routing
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.db import codec
from agentrl.store.db.codec import new_id
from agentrl.store.tables import interaction_data, interactions, trajectories, trajectory_interactions
from agentrl.store.training import returns, session_verdicts
from agentrl.store.training.returns import Rescore, SessionReturns

LONGEST_REASON = 100
"""Characters of the column."""


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

    A path is rejected at once when the session has no reward, when its agent rejected it, or when the path owns no
    trainable token.
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
                    **worth(owned, credited, verdict),
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
        select(trajectories.c.id.label("trajectory_id"), interactions)
        .join(trajectory_interactions, trajectory_interactions.c.trajectory_id == trajectories.c.id)
        .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
        .where(trajectories.c.session_id.in_(members), trajectory_interactions.c.owned.is_(True))
    ):
        owned.setdefault((row.session_id, row.trajectory_id), []).append(row)
    credited = returns.of_sessions(conn, members, discount)
    found = session_verdicts.of_sessions(conn, members)
    for (sid, trajectory_id), calls in owned.items():
        values = worth(calls, credited[sid], found[sid])
        conn.execute(update(trajectories).where(trajectories.c.id == trajectory_id).values(values))


def worth(owned: Sequence[Any], credited: SessionReturns, verdict: Verdict) -> Json:
    """The columns of a trajectory that follow from applied rewards and the session's verdict: return, trainable tokens,
    versions, state, reason.

    `owned` are the calls whose outputs the trajectory owns.
    """
    trained = [
        row for row in owned if row.trainable and verdict.count(row.id, row.output_tokens) and row.id in credited.calls
    ]
    reason = None
    if not trained:
        reason = "no_trainable_tokens"
    elif verdict.rejected is not None:
        reason = rejected(verdict.rejected)
    elif not credited.rewarded:
        reason = "no_reward"
    return {
        "trainable_tokens": sum(verdict.count(row.id, row.output_tokens) for row in trained),
        "min_version": min((row.min_version for row in trained), default=None),
        "max_version": max((row.max_version for row in trained), default=None),
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
    loss, and so is every token of a trajectory in `stale`. `routing` loads the recorded experts too.
    """
    rows = conn.execute(
        select(
            trajectories.c.id.label("trajectory_id"),
            trajectories.c.session_id,
            trajectories.c.group_id,
            trajectory_interactions.c.owned,
            interactions.c.id.label("interaction_id"),
            interactions.c.trainable,
            interactions.c.temperature,
            interactions.c.kv_mixed,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.output_ids,
            interaction_data.c.logprobs,
            interaction_data.c.spans,
        )
        .join(trajectory_interactions, trajectory_interactions.c.trajectory_id == trajectories.c.id)
        .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(trajectories.c.id.in_(trajectory_ids))
        .order_by(trajectories.c.id, trajectory_interactions.c.position)
    )
    by_id: dict[str, list[Any]] = {tid: [] for tid in trajectory_ids}
    for row in rows:
        by_id[row.trajectory_id].append(row)
    sessions_of = {tid: str(turns[0].session_id) for tid, turns in by_id.items()}
    session_ids = sorted(set(sessions_of.values()))
    credited = returns.of_sessions(conn, session_ids, discount, rescore)
    found = session_verdicts.of_sessions(conn, session_ids)
    loaded = [
        assemble(by_id[tid], credited[sid], found[sid], set() if tid in stale else ages.keys())
        for tid, sid in sessions_of.items()
    ]
    if routing:
        chosen = call_routing.of_trajectories(conn, {t.trajectory_id: len(t.input_ids) for t, _ in loaded})
        loaded = [(replace(t, routed=chosen.get(t.trajectory_id)), wasted) for t, wasted in loaded]
    seen = {version for turns in by_id.values() for turn in turns for version, _, _ in turn.spans}
    return Loaded(
        trajectories=[tokens for tokens, _ in loaded],
        ages={version: age for version, age in ages.items() if version in seen},
        wasted_tokens=sum(wasted for _, wasted in loaded),
    )


def assemble(
    turns: Sequence[Any], credited: SessionReturns, verdict: Verdict, young: Set[int]
) -> tuple[TrajectoryTokens, int]:
    """One trajectory, and how many of its tokens are too old to train; `turns` are rows as `load` reads them."""
    ids, mask, logprobs, versions, turn_ids, temperatures = ([] for _ in range(6))
    wasted = 0
    for position, turn in enumerate(turns):
        delta, output = codec.unpack_ids(turn.prompt_delta_ids), codec.unpack_ids(turn.output_ids)
        trains = turn.owned and turn.trainable and turn.interaction_id in credited.calls
        sampled_by = np.empty(len(output), np.int32)
        trained = np.zeros(len(output), np.bool_)
        for version, start, end in turn.spans:
            sampled_by[start:end] = version
        for version, start, end in verdict.within(turn.interaction_id, turn.spans) if trains else ():
            trained[start:end] = version in young
            wasted += 0 if version in young else end - start
        ids += [delta, output]
        mask += [np.zeros(len(delta), np.bool_), trained]
        logprobs += [np.zeros(len(delta), np.float32), codec.unpack_logprobs(turn.logprobs)]
        versions += [np.full(len(delta), PROMPT_VERSION, np.int32), sampled_by]
        turn_ids += [np.full(len(delta), -1, np.int32), np.full(len(output), position, np.int32)]
        temperatures += [np.ones(len(delta), np.float32), np.full(len(output), turn.temperature, np.float32)]
    tokens = TrajectoryTokens(
        trajectory_id=turns[0].trajectory_id,
        session_id=turns[0].session_id,
        episode_id=credited.episode_id,
        group_id=turns[0].group_id,
        input_ids=np.concatenate(ids),
        loss_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        turn_ids=np.concatenate(turn_ids),
        temperatures=np.concatenate(temperatures),
        turn_returns=np.array([credited.calls.get(turn.interaction_id, 0.0) for turn in turns], np.float64),
        episode_return=credited.episode_return,
        kv_mixed_turns=frozenset(position for position, turn in enumerate(turns) if turn.kv_mixed),
    )
    return tokens, wasted
