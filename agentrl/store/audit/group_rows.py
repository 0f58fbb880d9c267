"""Loads groups for the audit, each with its sessions, calls, rewards, trajectories and trained rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.store.audit.lineage_audit import Lineage
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    replays,
    rewards,
    routed_experts,
    sessions,
    step_trajectories,
    trajectories,
    trajectory_interactions,
)

CLOCK_SLACK_S = 5.0
"""The largest difference between the clocks of two machines."""


@dataclass(slots=True)
class GroupRows:
    """A group with every row that belongs to it."""

    group: Row[Any]
    sessions: dict[str, Row[Any]] = field(default_factory=dict)
    calls: dict[str, Row[Any]] = field(default_factory=dict)  # with their arrays; finished ones first, in order
    rewards: list[Row[Any]] = field(default_factory=list)  # oldest first
    trajectories: dict[str, Row[Any]] = field(default_factory=dict)
    paths: dict[str, list[Row[Any]]] = field(default_factory=dict)  # trajectory → its calls, in order
    trained: dict[str, list[Row[Any]]] = field(default_factory=dict)  # trajectory → its rows of steps
    replays: dict[str, list[Row[Any]]] = field(default_factory=dict)  # trajectory → steps that train it once more

    def calls_of(self, session_id: str) -> list[Row[Any]]:
        """The calls of a session."""
        return [call for call in self.calls.values() if call.session_id == session_id]


def load(conn: Connection, run_id: str, first: str, last: str) -> list[GroupRows]:
    """The groups of a run from one id to another, with all their rows."""
    here = (groups.c.run_id == run_id, groups.c.id.between(first, last))
    found = {row.id: GroupRows(row) for row in conn.execute(select(groups).where(*here).order_by(groups.c.id))}
    of_session: dict[str, GroupRows] = {}
    of_trajectory: dict[str, GroupRows] = {}
    for row in conn.execute(
        select(sessions).join(groups, groups.c.id == sessions.c.group_id).where(*here).order_by(sessions.c.id)
    ):
        found[row.group_id].sessions[row.id] = row
        of_session[row.id] = found[row.group_id]
    data, routed = interaction_data.c, routed_experts.c
    routed_positions = (routed.recorded + routed.recomputed + routed.missing).label("routed_positions")
    arrays = (data.prompt_delta_ids, data.output_ids, data.logprobs, data.spans)
    for row in conn.execute(
        select(interactions, *arrays, routed.start.label("routed_start"), routed_positions)
        .join(sessions, sessions.c.id == interactions.c.session_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .outerjoin(interaction_data, data.interaction_id == interactions.c.id)
        .outerjoin(routed_experts, routed.interaction_id == interactions.c.id)
        .where(*here)
        .order_by(interactions.c.session_id, interactions.c.seq.is_(None), interactions.c.seq, interactions.c.id)
    ):
        of_session[row.session_id].calls[row.id] = row
    for row in conn.execute(
        select(rewards)
        .join(sessions, sessions.c.id == rewards.c.session_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(*here)
        .order_by(rewards.c.id)
    ):
        of_session[row.session_id].rewards.append(row)
    of_group = trajectories.join(groups, groups.c.id == trajectories.c.group_id)
    for row in conn.execute(select(trajectories).select_from(of_group).where(*here).order_by(trajectories.c.id)):
        found[row.group_id].trajectories[row.id] = row
        of_trajectory[row.id] = found[row.group_id]
    path, trained = trajectory_interactions.c, step_trajectories.c
    for row in conn.execute(
        select(trajectory_interactions)
        .select_from(of_group.join(trajectory_interactions, path.trajectory_id == trajectories.c.id))
        .where(*here)
        .order_by(path.trajectory_id, path.position)
    ):
        of_trajectory[row.trajectory_id].paths.setdefault(row.trajectory_id, []).append(row)
    for row in conn.execute(
        select(step_trajectories)
        .select_from(of_group.join(step_trajectories, trained.trajectory_id == trajectories.c.id))
        .where(*here)
        .order_by(trained.trajectory_id, trained.step_id)
    ):
        of_trajectory[row.trajectory_id].trained.setdefault(row.trajectory_id, []).append(row)
    for row in conn.execute(
        select(replays)
        .select_from(of_group.join(replays, replays.c.trajectory_id == trajectories.c.id))
        .where(*here)
        .order_by(replays.c.trajectory_id, replays.c.step_id)
    ):
        of_trajectory[row.trajectory_id].replays.setdefault(row.trajectory_id, []).append(row)
    return list(found.values())


def step_of(rows: GroupRows, lineage: Lineage) -> Row[Any] | None:
    ids = {t.lease_step_id for t in rows.trajectories.values() if t.lease_step_id is not None}
    return lineage.steps.get(min(ids)) if ids else None


def sessions_above(rows: GroupRows, session: Row[Any]) -> list[Row[Any]]:
    """The ancestors of a sub-agent's session, nearest first."""
    above: list[Row[Any]] = []
    parent = rows.sessions.get(session.parent_session_id)
    while parent is not None and len(above) < len(rows.sessions):  # broken rows may form a loop
        above.append(parent)
        parent = rows.sessions.get(parent.parent_session_id)
    return above


def from_the_top(rows: GroupRows) -> list[str]:
    """The sessions of a group, parents before their children; last those that broken rows put into a loop."""
    below: dict[str, list[str]] = {}
    order: list[str] = []
    for row in rows.sessions.values():
        if row.parent_session_id in rows.sessions:
            below.setdefault(row.parent_session_id, []).append(row.id)
        else:
            order.append(row.id)
    for session_id in order:
        order += below.get(session_id, [])
    return order + sorted(rows.sessions.keys() - order)
