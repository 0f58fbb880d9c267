"""Facts about a step's batch for its metrics: rewards by name, task sources, calls, stats.

Queries read no token arrays.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, func, select, union_all

from agentrl.domain.batches.reward_scaling import Moments, RewardScaling
from agentrl.store import task_rows
from agentrl.store.tables import (
    groups,
    interactions,
    replays,
    sessions,
    steps,
    tasks,
    trajectories,
    trajectory_interactions,
)
from agentrl.store.training import returns

SOURCE_KEYS = ("source", "data_source")
"""Keys of a task's data that may name its source; the first that holds text counts."""


@dataclass(frozen=True, slots=True)
class SampledBy:
    """The engine that sampled a call, or the last one if `several` did."""

    url: str
    backend: str | None
    several: bool


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts about the sessions, groups and calls that a step leased; `engines` also of what it trains once more."""

    rewards: dict[str, list[float]]  # name → per session with such a reward, the sum of its counted values
    sources: dict[str, str]  # group → its task's source, where the task names one or the run has several
    calls: int  # a call shared by several paths counts once
    truncated_calls: int  # calls whose answer reached its length limit
    stats: dict[str, list[float]] = field(default_factory=dict)  # name → the values of the sessions that measured it
    engines: dict[str, SampledBy] = field(default_factory=dict)  # by the id of the call
    moments: dict[str, Moments] = field(default_factory=dict)  # name of a normalised reward → its running statistics


def read(conn: Connection, step_id: str) -> BatchFacts:
    """The facts of a leased or trained step."""
    calls, truncated = _calls(conn, step_id)
    return BatchFacts(
        rewards=_rewards(conn, step_id),
        sources=sources(conn, step_id),
        calls=calls,
        truncated_calls=truncated,
        stats=_stats(conn, step_id),
        engines=_engines(conn, step_id),
        moments=_moments(conn, step_id),
    )


def _rewards(conn: Connection, step_id: str) -> dict[str, list[float]]:
    leased = select(trajectories.c.session_id).where(trajectories.c.lease_step_id == step_id)
    by_name: dict[str, list[float]] = defaultdict(list)
    for of_session in returns.recorded(conn, leased).values():
        totals: dict[str, float] = defaultdict(float)
        for name, value in of_session:
            totals[name] += value
        for name, total in totals.items():
            by_name[name].append(total)
    return dict(by_name)


def _moments(conn: Connection, step_id: str) -> dict[str, Moments]:
    scaling = conn.execute(select(steps.c.reward_scaling).where(steps.c.id == step_id)).scalar()
    return RewardScaling.from_json(scaling).of_names() if scaling else {}


def _stats(conn: Connection, step_id: str) -> dict[str, list[float]]:
    """By name, of the leased sessions and of the roots above them."""
    root = func.coalesce(sessions.c.root_session_id, sessions.c.id)
    leased = (
        select(sessions.c.id, root.label("root_id"))
        .join(trajectories, trajectories.c.session_id == sessions.c.id)
        .where(trajectories.c.lease_step_id == step_id)
        .cte("leased")
    )
    members = select(leased.c.id).union(select(leased.c.root_id))
    found: dict[str, list[float]] = defaultdict(list)
    for stats in conn.execute(
        select(sessions.c.stats).where(sessions.c.id.in_(members)).order_by(sessions.c.id)
    ).scalars():
        for name, value in (stats or {}).items():
            found[name].append(value)
    return dict(found)


def in_batch(step_id: str) -> ColumnElement[bool]:
    """Whether a step trains a trajectory: it has leased it, or trains it once more."""
    t = trajectories.alias()
    again = select(replays.c.trajectory_id).where(replays.c.step_id == step_id)
    leased = select(t.c.id).where(t.c.lease_step_id == step_id)
    return trajectories.c.id.in_(union_all(leased, again))  # PostgreSQL uses no index for an OR with a subquery


def sources(conn: Connection, step_id: str) -> dict[str, str]:
    """Group → its task's source, where the task names one or the run has several."""
    batch = select(trajectories.c.group_id).where(in_batch(step_id))
    candidates = [data[key] for data in (groups.c.task, tasks.c.data) for key in SOURCE_KEYS]
    rows = conn.execute(
        select(groups.c.id, groups.c.run_id, tasks.c.position, *candidates)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.id.in_(batch))
    ).all()
    names = [source.name for source in task_rows.sources(conn, rows[0].run_id)] if rows else []
    found = {
        group_id: next((v for v in values if isinstance(v, str) and v), _name(names, position))
        for group_id, _, position, *values in rows
    }
    return {group_id: source for group_id, source in found.items() if source is not None}


def task_sources(conn: Connection, step_id: str) -> dict[str, str]:
    """Group → the source of `tasks` that its task came from; tasks of programs have none."""
    rows = conn.execute(
        select(groups.c.id, groups.c.run_id, tasks.c.position)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.id.in_(select(trajectories.c.group_id).where(in_batch(step_id))))
    ).all()
    names = [source.name for source in task_rows.sources(conn, rows[0].run_id)] if rows else []
    return {row.id: names[row.position % len(names)] for row in rows}


def _name(sources: list[str], position: int | None) -> str | None:
    """The source of a task by its position, in a run of several sources."""
    return sources[position % len(sources)] if len(sources) > 1 and position is not None else None


def _calls(conn: Connection, step_id: str) -> tuple[int, int]:
    owned = (
        select(interactions.c.finish_reason)
        .join(trajectory_interactions, trajectory_interactions.c.interaction_id == interactions.c.id)
        .join(trajectories, trajectories.c.id == trajectory_interactions.c.trajectory_id)
        .where(trajectories.c.lease_step_id == step_id, trajectory_interactions.c.owned.is_(True))
        .subquery()
    )
    cut = func.count().filter(owned.c.finish_reason == "length")
    calls, truncated = conn.execute(select(func.count(), cut).select_from(owned)).one()
    return int(calls), int(truncated)


def _engines(conn: Connection, step_id: str) -> dict[str, SampledBy]:
    c = interactions.c
    rows = conn.execute(
        select(c.id, c.engine_url, c.engine_backend, c.engine_spans.is_not(None))
        .join(trajectory_interactions, trajectory_interactions.c.interaction_id == c.id)
        .join(trajectories, trajectories.c.id == trajectory_interactions.c.trajectory_id)
        .where(
            in_batch(step_id),
            trajectory_interactions.c.owned.is_(True),
            c.engine_url.is_not(None),
        )
    )
    return {call: SampledBy(url, backend, bool(several)) for call, url, backend, several in rows}
