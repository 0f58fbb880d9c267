"""The episodes of one evaluation, and since when a bounded number of evaluations began."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain import evaluation
from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import Json, SessionStatus, VersionState
from agentrl.store import evaluation_episodes, runs
from agentrl.store.tables import sessions, weight_versions
from agentrl.store.training import returns

MOST_EVALUATIONS, MOST_EPISODES = 60, 4096


def since(conn: Connection, run_id: str) -> float:
    """When the first version of the newest MOST_EVALUATIONS due evaluations was made; 0 if there are no more."""
    run = runs.get(conn, run_id)
    every = (run.config.get("evaluation") or {}).get("every")
    due = [step for step in evaluation.schedule(every, run.target_steps) if step <= run.published_step]
    if len(due) <= MOST_EVALUATIONS:
        return 0.0
    made = select(weight_versions.c.created_at).where(
        weight_versions.c.run_id == run_id,
        weight_versions.c.step == due[-MOST_EVALUATIONS],
        weight_versions.c.state != VersionState.ROLLED_BACK,
    )
    return float(conn.execute(made.order_by(weight_versions.c.version.desc()).limit(1)).scalar() or 0.0)


def of_version(conn: Connection, run_id: str, version: int) -> list[Json]:
    """The ended episodes of a version's evaluation: setting, index, sample, source, reward (null: none), its session.

    Of several tries of an episode, the first completed one counts, else the last one.
    """
    s = sessions.c
    rows = conn.execute(
        select(s.id, s.metadata, s.status, s.answer, s.error)
        .where(
            s.run_id == run_id,
            s.is_eval.is_(True),
            s.parent_session_id.is_(None),
            s.status.in_(evaluation_episodes.ENDED),
            s.metadata[evaluation.KEY]["version"].as_integer() == version,
        )
        .order_by(s.id)
        .limit(MOST_EPISODES)
    ).all()
    facts = returns.applied(conn, [row.id for row in rows])
    found: dict[evaluation.Episode, Json] = {}
    for row in rows:
        label = Label.of(row.metadata)
        if label is None:
            continue
        known = found.get(label.episode)
        if known is None or known["status"] != SessionStatus.COMPLETED:
            found[label.episode] = {
                "setting": label.episode.setting,
                "index": label.episode.index,
                "sample": label.episode.sample,
                "source": label.source,
                "session_id": row.id,
                "status": row.status,
                "reward": facts[row.id].total if row.status == SessionStatus.COMPLETED else None,
                "answer": row.answer,
                "error": row.error,
            }
    return list(found.values())
