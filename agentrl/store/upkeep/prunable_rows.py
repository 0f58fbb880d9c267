"""The rows that retention may remove, as conditions on their tables."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, exists, func, or_, select, true

from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import InteractionStatus
from agentrl.store import evaluation_episodes
from agentrl.store.tables import (
    contents,
    events,
    groups,
    heartbeats,
    interaction_data,
    interactions,
    keys,
    rewards,
    routed_experts,
    sessions,
    step_trajectories,
    steps,
    teacher_logprobs,
    token_facts,
    trajectories,
    trajectory_interactions,
    unsent_traces,
)

PAGE_GROUPS = 32
HEARTBEATS_KEPT_S = 86400.0
KEPT_EVENTS = ("stopped",)
"""Kinds of events that are kept: a run's total time is summed from them."""
ENDED = ("rejected", "stale", "evaluated")


def prunable(run_id: str, cut: float, kept: Set[str]) -> list[ColumnElement[bool]]:
    needed = exists().where(
        trajectories.c.group_id == groups.c.id,
        or_(
            trajectories.c.lease_step_id.is_not(None),
            exists().where(step_trajectories.c.trajectory_id == trajectories.c.id),
        ),
    )
    return [
        groups.c.run_id == run_id,
        groups.c.state.in_(ENDED),
        groups.c.state != "trained",  # lets the planner use `ix_groups_untrained`
        groups.c.finished_at < cut,
        groups.c.id.not_in(kept),
        ~needed,
    ]


def count_groups(conn: Connection, run_id: str, cut: float, kept: Set[str]) -> int:
    statement = select(func.count()).select_from(groups).where(*prunable(run_id, cut, kept))
    return int(conn.execute(statement).scalar_one())


def next_groups(conn: Connection, run_id: str, cut: float, kept: Set[str], after: str) -> list[str]:
    return list(
        conn.execute(
            select(groups.c.id)
            .where(*prunable(run_id, cut, kept), groups.c.id > after)
            .order_by(groups.c.id)
            .limit(PAGE_GROUPS)
        ).scalars()
    )


def kept_evaluations(conn: Connection, run_id: str) -> set[str]:
    """The groups of the surviving lineage's first evaluation, its newest complete one, and all later ones."""
    found = evaluation_episodes.of_run(conn, run_id)
    newest = max((one.step for one in found if one.complete), default=0)
    kept = {one.version for one in found if one.step == found[0].step or one.step >= newest}
    of_run = select(sessions.c.group_id, sessions.c.metadata).where(
        sessions.c.run_id == run_id, sessions.c.is_eval.is_(True)
    )
    labels = {row.group_id: Label.of(row.metadata) for row in conn.execute(of_run)}
    return {group_id for group_id, label in labels.items() if label is not None and label.version in kept}


def rows_of_groups(group_ids: Sequence[str]) -> dict[Table, ColumnElement[bool]]:
    """Each table with rows of the groups → the condition for them; referring tables come first."""
    of_session = select(sessions.c.id).where(sessions.c.group_id.in_(group_ids))
    of_call = select(interactions.c.id).where(interactions.c.session_id.in_(of_session))
    of_trajectory = select(trajectories.c.id).where(trajectories.c.group_id.in_(group_ids))
    return {
        token_facts: token_facts.c.trajectory_id.in_(of_trajectory),
        teacher_logprobs: teacher_logprobs.c.trajectory_id.in_(of_trajectory),
        trajectory_interactions: trajectory_interactions.c.trajectory_id.in_(of_trajectory),
        trajectories: trajectories.c.group_id.in_(group_ids),
        rewards: rewards.c.session_id.in_(of_session),
        unsent_traces: unsent_traces.c.session_id.in_(of_session),
        keys: keys.c.session_id.in_(of_session),
        routed_experts: routed_experts.c.interaction_id.in_(of_call),
        interaction_data: interaction_data.c.interaction_id.in_(of_call),
        interactions: interactions.c.session_id.in_(of_session),
        sessions: sessions.c.group_id.in_(group_ids),
        groups: groups.c.id.in_(group_ids),
    }


def _used() -> list[Select[Any]]:
    columns = (interactions.c.tools_hash, interactions.c.system_hash)
    return [select(column).where(column.is_not(None)) for column in columns]


def orphaned(condition: ColumnElement[bool] = true()) -> list[ColumnElement[bool]]:
    """Conditions for contents that no call refers to, counting only calls for which `condition` holds."""
    return [contents.c.hash.not_in(used.where(condition)) for used in _used()]


def orphans(conn: Connection) -> list[str]:
    return list(conn.execute(select(contents.c.hash).where(*orphaned())).scalars())


def old_facts(run_id: str, cut: float) -> list[ColumnElement[bool]]:
    """Facts of tokens that steps trained which began before the cut: no lineage needs them."""
    old = select(steps.c.id).where(steps.c.run_id == run_id, steps.c.started_at < cut)
    return [token_facts.c.step_id.in_(old)]


def old_events(run_id: str, cut: float) -> list[ColumnElement[bool]]:
    return [events.c.run_id == run_id, events.c.created_at < cut, events.c.kind.not_in(KEPT_EVENTS)]


def old_heartbeats(run_id: str, cut: float) -> list[ColumnElement[bool]]:
    """Heartbeats of participants that were silent for a day; sweeps still need newer ones to find dead participants."""
    silent = min(cut, time.time() - HEARTBEATS_KEPT_S)
    serving = select(interactions.c.replica).where(interactions.c.status == InteractionStatus.RUNNING)
    return [
        heartbeats.c.run_id == run_id,
        heartbeats.c.last_seen_at < silent,
        heartbeats.c.name.not_in(serving),
    ]
