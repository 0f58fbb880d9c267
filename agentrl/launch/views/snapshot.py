"""Reads the current state of a run from the store, for the display and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.domain.evaluation import Evaluation
from agentrl.store import Connection, Row, activity, engine_claims, evaluation_episodes, runs
from agentrl.store.sessions.ends import failures
from agentrl.store.training import steps

RATE_WINDOW_S = 20.0
LONGEST_CALL_S = 120.0  # calls that last longer are left out of the rate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One finished optimizer step. `reward` is the mean return of the sessions it trained."""

    step: int
    reward: float
    staleness_max: int
    tokens_trained: int
    trajectories: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run."""

    status: str
    target_steps: int
    published_step: int
    version: int
    ready_groups: int
    running_groups: int
    newest_step_state: str | None
    engines: dict[str, str]  # url → state
    tokens_per_s: float  # sampled tokens in the rate window
    failing: str | None = None  # the newest session's error, when the last sessions all failed
    points: list[StepPoint] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # ordered by step


def take(conn: Connection, run_id: str, after_step: int = 0) -> Snapshot:
    """Read the run's state in one transaction, with the points of steps after `after_step`.

    A positive `after_step` limits the evaluations to the newest. Repeated calls then have a constant cost.
    """
    run = runs.get(conn, run_id)
    return Snapshot(
        status=run.status,
        target_steps=run.target_steps,
        published_step=run.published_step,
        version=run.current_version,
        ready_groups=runs.ready_groups(conn, run_id),
        running_groups=run.running,
        newest_step_state=steps.newest_state(conn, run_id),
        engines=engine_claims.states(conn, run_id),
        tokens_per_s=activity.output_tokens_per_s(conn, run_id, RATE_WINDOW_S, LONGEST_CALL_S),
        failing=failures.newest_error(conn, run_id),
        points=_points(steps.of_run(conn, run_id, after_step)),
        evaluations=evaluation_episodes.newest(conn, run) if after_step else evaluation_episodes.of_run(conn, run_id),
    )


def _points(lineage: list[Row[Any]]) -> list[StepPoint]:
    return [
        StepPoint(
            step=row.step,
            reward=row.return_mean,
            staleness_max=row.staleness_max,
            tokens_trained=row.tokens_trained,
            trajectories=row.trajectories,
            metrics=row.metrics,
        )
        for row in lineage
        if row.return_mean is not None and row.staleness_max is not None
    ]
