"""Where a session stands in its run, in words that a second run of the same configuration has too."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.domain.evaluation import Label
from agentrl.store.tables import groups, sessions


def place_of(conn: Connection, session_id: str) -> str:
    """The data cursor and the sample of a session; of one in an evaluation, its episode and which attempt it is."""
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
