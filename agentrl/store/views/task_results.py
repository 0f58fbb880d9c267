"""The results of each task of a run: how often it was sampled, how often it was solved, and what it earned.

    groups, oldest first:  ended … ended │ ended, sampled, ready, leased …
                           kept by task  │ read each time

A group that is trained, stale or rejected keeps its returns. So a process adds up the groups before the oldest one that
may still change, and reads only later ones. A trainer that starts again may roll steps back: then all are read anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select

from agentrl.domain.ties import TIE
from agentrl.store import runs
from agentrl.store.db import codec
from agentrl.store.tables import groups, sessions, trajectories

CHANGING = ("running", "ready", "leased")
CLOCK_SLACK_S = 60.0
"""How much the clocks of replicas may differ: a new group's id may be this much older than the newest one."""
LAST = "g"
"""Sorts after every id."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The groups of one task that have ended. An episode is a root session that has trajectories."""

    groups: int = 0
    episodes: int = 0
    solved: int = 0  # episodes whose return reached the success threshold
    returns: float = 0.0  # the sum over episodes
    last_cursor: int = 0  # the newest place of the data cursor that gave the task
    last_step_id: str | None = None  # of the newest step that leased or trained it

    @property
    def success_rate(self) -> float | None:
        """The share of episodes that are solved; None without an episode."""
        return self.solved / self.episodes if self.episodes else None

    @property
    def mean_return(self) -> float | None:
        """The mean over episodes; None without an episode."""
        return self.returns / self.episodes if self.episodes else None

    def __add__(self, other: TaskResult) -> TaskResult:
        return TaskResult(
            self.groups + other.groups,
            self.episodes + other.episodes,
            self.solved + other.solved,
            self.returns + other.returns,
            max(self.last_cursor, other.last_cursor),
            max(self.last_step_id or "", other.last_step_id or "") or None,
        )


Results = Mapping[str, TaskResult]
"""By the task's id."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The results of all groups whose ids sort before `until`, while a trainer's epoch lasts."""

    epoch: int
    success: float
    until: str
    results: Results


def read(conn: Connection, run_id: str, success: float, kept: Kept | None = None) -> tuple[Results, Kept]:
    """The results of the run's own tasks that were sampled, and what to pass at the next call.

    An episode is solved if its return is at least `success`. Without `kept`, or in another epoch or with another
    threshold, all trajectories are read. Groups that retention has removed since are still counted.
    """
    epoch = int(runs.get(conn, run_id).trainer_epoch)
    if kept is None or (kept.epoch, kept.success) != (epoch, success):
        kept = Kept(epoch, success, "", {})
    changing = (groups.c.run_id == run_id, groups.c.state.in_(CHANGING), groups.c.state != "trained")
    oldest = conn.execute(select(func.min(groups.c.id)).where(*changing)).scalar_one()
    until = max(kept.until, min(oldest or LAST, codec.first_id(time.time() - CLOCK_SLACK_S)))
    ended = _added(kept.results, _between(conn, run_id, success, kept.until, until))
    later = _between(conn, run_id, success, until, LAST)
    return _added(ended, later), Kept(epoch, success, until, ended)


def _between(conn: Connection, run_id: str, success: float, first: str, before: str) -> Results:
    """The results of groups from one id on, before another."""
    outcome: Any = trajectories.c["return"]
    episodes = (
        select(
            trajectories.c.group_id,
            func.max(outcome).label("outcome"),
            func.max(trajectories.c.lease_step_id).label("step_id"),
        )
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .where(trajectories.c.run_id == run_id, sessions.c.parent_session_id.is_(None))
        .where(trajectories.c.group_id >= first, trajectories.c.group_id < before)
        .group_by(trajectories.c.group_id, trajectories.c.session_id)
        .subquery()
    )
    rows = conn.execute(
        select(
            groups.c.task_id,
            func.count(groups.c.id.distinct()),
            func.count(episodes.c.outcome),
            func.coalesce(func.sum(case((episodes.c.outcome >= success - TIE, 1), else_=0)), 0),
            func.coalesce(func.sum(episodes.c.outcome), 0.0),
            func.max(groups.c.cursor),
            func.max(episodes.c.step_id),
        )
        .outerjoin(episodes, episodes.c.group_id == groups.c.id)
        .where(groups.c.run_id == run_id, groups.c.task_id.is_not(None), groups.c.state != "running")
        .where(groups.c.id >= first, groups.c.id < before)
        .group_by(groups.c.task_id)
    )
    return {
        task_id: TaskResult(n, int(of_episodes), int(solved), float(returns), int(cursor or 0), step_id)
        for task_id, n, of_episodes, solved, returns, cursor, step_id in rows
    }


def _added(results: Results, more: Results) -> Results:
    found = dict(results)
    for task_id, result in more.items():
        found[task_id] = found[task_id] + result if task_id in found else result
    return found
