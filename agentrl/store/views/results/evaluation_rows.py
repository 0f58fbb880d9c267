"""The episodes of one evaluation."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain import evaluation
from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import ENDED, Json, SessionStatus
from agentrl.store.tables import sessions
from agentrl.store.training import returns

MOST_EPISODES = 4096


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
            s.status.in_(ENDED),
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
