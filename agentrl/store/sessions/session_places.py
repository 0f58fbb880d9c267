"""A session's place in its run, as text that is equal in every run of the same configuration."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain.evaluation import Label
from agentrl.store.tables import groups, sessions


def place_of(conn: Connection, session_id: str) -> str:
    """Data cursor and sample of a training session; episode and attempt of an evaluation session."""
    row = conn.execute(
        select(sessions.c.run_id, groups.c.cursor, sessions.c.sample_index, sessions.c.metadata)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id == session_id)
    ).one()
    label = Label.of(row.metadata)
    if label is None:
        return f"group {row.cursor} {row.sample_index}"
    before = conn.execute(
        select(sessions.c.metadata).where(
            sessions.c.run_id == row.run_id, sessions.c.is_eval.is_(True), sessions.c.id < session_id
        )
    ).scalars()
    attempt = sum(Label.of(metadata) == label for metadata in before)
    episode = label.episode
    return f"evaluation {label.step} {episode.setting} {episode.index} {episode.sample} {attempt}"
