"""Finds sessions: by id, by key, by owner, by name."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, or_, select

from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import SessionStatus
from agentrl.store.tables import groups, sessions


def get(conn: Connection, session_id: str) -> Row[Any] | None:
    """One session with its group's sampling overrides."""
    return conn.execute(
        select(sessions, groups.c.sampling, groups.c.external)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id == session_id)
    ).first()


def by_key_hash(conn: Connection, run_id: str, key_hash: str) -> str | None:
    """The id of the run's session that a key opens."""
    of_key = select(sessions.c.id).where(sessions.c.key_hash == key_hash, sessions.c.run_id == run_id)
    return conn.execute(of_key).scalar()


def run_of(conn: Connection, session_id: str) -> str | None:
    """The run of a session."""
    return conn.execute(select(sessions.c.run_id).where(sessions.c.id == session_id)).scalar()


def open_of_owner(conn: Connection, run_id: str, owner: str) -> list[str]:
    """The open sessions of a worker. A restarted worker ends those that it left when it died."""
    return list(
        conn.execute(
            select(sessions.c.id)
            .join(groups, groups.c.id == sessions.c.group_id)
            .where(groups.c.run_id == run_id, groups.c.owner == owner, groups.c.state == "running")
            .where(sessions.c.status == SessionStatus.OPEN, sessions.c.parent_session_id.is_(None))
        ).scalars()
    )


def left_behind(conn: Connection, run_id: str, owner: str) -> list[tuple[str, str]]:
    """(session, its owner) for every open session under the worker's name that another instance of it owns.

    `owner` is NAME/INSTANCE. A NAME alone owns all sessions under that name, those of an earlier life included.
    """
    name, _, instance = owner.rpartition("/")
    name = name or instance
    owners = conn.execute(
        select(groups.c.owner).distinct().where(groups.c.run_id == run_id, groups.c.state == "running")
    ).scalars()
    others = [o for o in owners if o is not None and name in (o, o.rpartition("/")[0]) and (o != owner or o == name)]
    return [(session_id, other) for other in others for session_id in open_of_owner(conn, run_id, other)]


def find_named(conn: Connection, run_id: str, named: str) -> str | None:
    """The run's session with this id or, if there is none, with this name."""
    rows = conn.execute(
        select(sessions.c.id).where(sessions.c.run_id == run_id, or_(sessions.c.id == named, sessions.c.name == named))
    )
    found = list(rows.scalars())
    return named if named in found else next(iter(found), None)


def find_child(conn: Connection, run_id: str, parent_id: str, name: str, key_hash: str) -> str | None:
    """The sub-agent's session under `parent_id` that has this id, or that was opened with this key hash."""
    row = get(conn, name)
    if row is not None and row.parent_session_id == parent_id:
        return name
    return by_key_hash(conn, run_id, key_hash)


def place_of(conn: Connection, session_id: str) -> str:
    """A session's place in its run, as text that is equal in every run of the same configuration.

    Data cursor and sample of a training session; episode and attempt of an evaluation session.
    """
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
