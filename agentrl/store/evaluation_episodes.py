"""Evaluations, computed from their sessions; nothing else is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from agentrl.configs.run_config import RunConfig
from agentrl.domain import evaluation
from agentrl.domain.evaluation import Evaluation, Label
from agentrl.domain.sample_metrics import scored
from agentrl.domain.schemas import ENDED, InteractionStatus, Json, SessionStatus, VersionState
from agentrl.store import runs
from agentrl.store.db import codec
from agentrl.store.tables import interactions, sessions, weight_versions
from agentrl.store.training import returns

ANSWERED = (InteractionStatus.COMPLETE,)
UNANSWERED = (InteractionStatus.FAILED, InteractionStatus.LOST)
CLOCK_SLACK_S = 3600.0
"""How much the clocks of trainer and proxy may differ: a session may seem to begin this long before its version."""


def episodes(conn: Connection, run_id: str, *, version: int | None = None, since: float = 0.0) -> list[Json]:
    """Ended evaluation sessions, oldest first, with their metadata, status, reward, answer and the versions that
    sampled them.

    Only those of `version`, if given; only those begun at about `since` or later. Sessions of outside programs are
    included. `fault` marks a failed session whose calls were not all answered, or that made none. With
    `evaluation.best_of`, a completed session has `best_of`, its score and its true reward.
    """
    if version is not None:
        known = runs.version(conn, run_id, version)
        if known is None:
            return []
        since = max(since, known.created_at)
    of_run = (
        sessions.c.run_id == run_id,
        sessions.c.is_eval.is_(True),
        sessions.c.id > codec.first_id(max(0.0, since - CLOCK_SLACK_S)),
    )
    rows = conn.execute(
        select(
            sessions.c.id,
            sessions.c.group_id,
            sessions.c.metadata,
            sessions.c.status,
            sessions.c.answer,
            sessions.c.stats,
        )
        .where(*of_run, sessions.c.status.in_(ENDED), sessions.c.parent_session_id.is_(None))
        .order_by(sessions.c.id)
    ).all()
    if version is not None:
        rows = [row for row in rows if (label := Label.of(row.metadata)) is not None and label.version == version]
    facts = returns.applied(conn, select(sessions.c.id).where(*of_run))
    answered, unanswered = _failed_with(conn, of_run, ANSWERED), _failed_with(conn, of_run, UNANSWERED)
    spans = conn.execute(
        select(sessions.c.group_id, func.min(interactions.c.min_version), func.max(interactions.c.max_version))
        .join(interactions, interactions.c.session_id == sessions.c.id)
        .where(*of_run)
        .group_by(sessions.c.group_id)
    )
    versions = {group_id: (low, high) for group_id, low, high in spans}  # calls of sub-agents included
    if not rows:
        return []
    best_of = (runs.get(conn, run_id).config.get("evaluation") or {}).get("best_of")
    found = []
    for row in rows:
        low, high = versions.get(row.group_id, (None, None))
        fault = row.group_id not in answered or row.group_id in unanswered
        of_row = {"session_id": row.id, "status": row.status, "reward": facts[row.id].total, "answer": row.answer}
        of_row |= {"version_min": low, "version_max": high}
        of_row |= {"stats": row.stats} if row.stats else {}
        if best_of is not None and row.status == SessionStatus.COMPLETED:
            rewards = {name: own.total for name, own in facts[row.id].named.items()}
            of_row["best_of"] = asdict(scored(rewards, row.stats or {}, best_of["by"], best_of.get("rewards")))
        found.append({**dict(row.metadata), **of_row, "fault": row.status == SessionStatus.FAILED and fault})
    return found


def _failed_with(conn: Connection, of_run: tuple[ColumnElement[bool], ...], statuses: Sequence[str]) -> set[str]:
    """The groups of failed sessions with a call in one of these statuses, calls of sub-agents included."""
    failed = select(sessions.c.group_id).where(*of_run, sessions.c.status == SessionStatus.FAILED).correlate(None)
    of_session = interactions.c.session_id == sessions.c.id
    query = select(sessions.c.group_id).distinct().join(interactions, of_session)
    of_groups = (sessions.c.group_id.in_(failed), interactions.c.status.in_(statuses))
    return set(conn.execute(query.where(*of_groups)).scalars())


def of_run(conn: Connection, run_id: str, since: float = 0.0) -> list[Evaluation]:
    """The evaluations of the surviving lineage by step, for versions made at `since` or later."""
    found = evaluation.collect(episodes(conn, run_id, since=since))
    survivors = {
        row.version for row in _surviving(conn, run_id, [one.step for one in found]) if row.created_at >= since
    }
    return sorted((one for one in found if one.version in survivors), key=lambda one: one.step)


def newest(conn: Connection, run: Row[Any], from_step: int | None = None) -> list[Evaluation]:
    """The newest due evaluation and the one before it, if they have begun, without reading the whole run.

    With `from_step`, also the evaluations of that step and of later ones.
    """
    every = (run.config.get("evaluation") or {}).get("every")
    due = [step for step in evaluation.schedule(every, run.target_steps) if step <= run.published_step]
    first = min(due[-2:][:1] + ([] if from_step is None else [from_step]), default=0)
    made = min((row.created_at for row in _surviving(conn, run.id, [s for s in due if s >= first])), default=0.0)
    return of_run(conn, run.id, made)


def of_version(conn: Connection, run_id: str, version: int) -> Evaluation | None:
    """The evaluation of a version so far; None before an episode of it has ended."""
    return next(iter(evaluation.collect(episodes(conn, run_id, version=version))), None)


def is_complete(conn: Connection, run_id: str, version: int) -> bool:
    """Whether every episode of a version's evaluation has ended."""
    found = of_version(conn, run_id, version)
    return found is not None and found.complete


def paused(conn: Connection, run_id: str, version: int, config: RunConfig) -> bool:
    """Whether publishing `version` is paused until the served version is evaluated (`evaluation.hold`)."""
    run = runs.get(conn, run_id)
    if not (config.evaluation.hold and config.is_evaluated) or version == run.current_version:
        return False
    served = runs.version(conn, run_id, run.current_version)
    if served is None or served.state == VersionState.ROLLED_BACK:
        return False
    due = run.published_step in evaluation.schedule(config.evaluation.every, run.target_steps)
    return due and not is_complete(conn, run_id, run.current_version)


def _surviving(conn: Connection, run_id: str, of_steps: list[int]) -> list[Row[Any]]:
    return list(
        conn.execute(
            select(weight_versions.c.version, weight_versions.c.created_at).where(
                weight_versions.c.run_id == run_id,
                weight_versions.c.step.in_(of_steps),
                weight_versions.c.state != VersionState.ROLLED_BACK,
            )
        )
    )
