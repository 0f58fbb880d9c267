"""The run as the store has it right now: what progress shows and what the summary reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, select

from agentrl.store import runs, sessions, steps
from agentrl.tables import engines, interactions, step_trajectories, trajectories


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
    output_tokens: int
    points: list[StepPoint] = field(default_factory=list)
    evaluations: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # (before|after, setting) → rewards


def take(conn: Connection, run_id: str) -> Snapshot:
    """Read it in one transaction."""
    run = runs.get(conn, run_id)
    lineage = steps.of_run(conn, run_id)
    by_state = runs.state_counts(conn, run_id)["groups"]
    return Snapshot(
        status=run.status,
        target_steps=run.target_steps,
        published_step=run.published_step,
        version=run.current_version,
        ready_groups=by_state.get("ready", 0),
        running_groups=run.running,
        newest_step_state=lineage[-1].state if lineage else None,
        engines={row.url: row.state for row in conn.execute(select(engines).where(engines.c.run_id == run_id))},
        output_tokens=conn.execute(
            select(func.coalesce(func.sum(interactions.c.output_tokens), 0)).where(interactions.c.run_id == run_id)
        ).scalar_one(),
        points=_points(conn, lineage),
        evaluations=_evaluations(conn, run_id),
    )


def _points(conn: Connection, lineage: list[Row[Any]]) -> list[StepPoint]:
    trained = {
        row.step_id: row
        for row in conn.execute(
            select(
                step_trajectories.c.step_id,
                func.avg(trajectories.c["return"]).label("reward"),
                func.max(step_trajectories.c.staleness_max).label("staleness_max"),
                func.sum(step_trajectories.c.tokens_trained).label("tokens_trained"),
                func.count().label("trajectories"),
            )
            .join(trajectories, trajectories.c.id == step_trajectories.c.trajectory_id)
            .where(step_trajectories.c.step_id.in_([row.id for row in lineage]))
            .group_by(step_trajectories.c.step_id)
        )
    }
    return [
        StepPoint(
            step=row.step,
            reward=float(totals.reward),
            staleness_max=totals.staleness_max,
            tokens_trained=totals.tokens_trained,
            trajectories=totals.trajectories,
            metrics=row.metrics,
        )
        for row in lineage
        if (totals := trained.get(row.id)) is not None
    ]


def _evaluations(conn: Connection, run_id: str) -> dict[tuple[str, str], list[float]]:
    """Rewards by task of the newest evaluation of each kind: the completed episode's, or 0."""
    rows = [row for row in sessions.evaluations(conn, run_id) if "eval" in row]
    newest = {when: max(row["step"] for row in rows if row["eval"] == when) for when in {row["eval"] for row in rows}}
    rewards: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["step"] == newest[row["eval"]]:
            of_setting = rewards.setdefault((row["eval"], row["setting"]), {})
            reward = row["reward"] if row["status"] == "completed" else 0.0
            of_setting[row["index"]] = max(reward, of_setting.get(row["index"], 0.0))
    return {key: [by_index[index] for index in sorted(by_index)] for key, by_index in rewards.items()}
