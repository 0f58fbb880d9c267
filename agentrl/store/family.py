"""The tree of a root session and the sub-agents' sessions below it, at every level. One query loads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, or_, select

from agentrl.store.db.id_lists import parts
from agentrl.store.tables import sessions


class Family:
    """The sessions of one tree as loaded: id, parent, depth, status, built, last_seen_at."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._members = {row.id: row for row in rows}  # parents before their children

    def above(self, session_id: str) -> list[Any]:
        """The ancestors of a session, nearest first."""
        found: list[Any] = []
        parent_id = self._members[session_id].parent_session_id
        while parent_id is not None:
            found.append(self._members[parent_id])
            parent_id = found[-1].parent_session_id
        return found

    def below(self, session_id: str) -> list[Any]:
        """The descendants of a session, level by level, each level in order of ids."""
        ids = {session_id}
        found: list[Any] = []
        for row in self._members.values():
            if row.parent_session_id in ids:
                ids.add(row.id)
                found.append(row)
        return found

    def is_built(self, session_id: str) -> bool:
        """Whether the trajectories of a session exist."""
        return bool(self._members[session_id].built)


def root_of(session: Any) -> str:
    """The id of the root of a session, given as a row. A session without a parent is its own root."""
    return str(session.root_session_id or session.id)


def load(conn: Connection, root_id: str) -> Family:
    """The tree of a root."""
    c = sessions.c
    rows = conn.execute(
        select(c.id, c.parent_session_id, c.depth, c.status, c.built, c.last_seen_at)
        .where(or_(c.id == root_id, c.root_session_id == root_id))
        .order_by(c.depth, c.id)
    )
    return Family(rows.all())


def lineage(conn: Connection, session_ids: Iterable[str]) -> dict[str, str | None]:
    """Sessions and their ancestors → the parent of each; parents come before their children."""
    found: dict[str, str | None] = {}
    for ids in parts(sorted(set(session_ids))):
        found |= _lineage(conn, ids)
    return found


def _lineage(conn: Connection, session_ids: list[str]) -> dict[str, str | None]:
    c = sessions.c
    named = list(conn.execute(select(c.id, c.root_session_id).where(c.id.in_(session_ids))))
    roots = {row.root_session_id for row in named if row.root_session_id is not None}
    if not roots:
        return {row.id: None for row in named}
    rows = conn.execute(
        select(c.id, c.parent_session_id)
        .where(or_(c.id.in_([row.id for row in named]), c.id.in_(roots), c.root_session_id.in_(roots)))
        .order_by(c.depth, c.id)
    )
    parents: dict[str, str | None] = {row.id: row.parent_session_id for row in rows}
    wanted: set[str] = set()
    for row in named:
        session_id: str | None = row.id
        while session_id is not None and session_id not in wanted:
            wanted.add(session_id)
            session_id = parents[session_id]
    return {session_id: parent_id for session_id, parent_id in parents.items() if session_id in wanted}


def roots(conn: Connection, session_ids: Iterable[str]) -> dict[str, str]:
    """The episode of each session: the id of its root. A session without a parent is its own root."""
    c = sessions.c
    return {
        row.id: root_of(row)
        for ids in parts(sorted(set(session_ids)))
        for row in conn.execute(select(c.id, c.root_session_id).where(c.id.in_(ids)))
    }


def ids_below(conn: Connection, session_id: str) -> list[str]:
    """The sub-agents' sessions of every level below a session, level by level."""
    row = conn.execute(select(sessions.c.id, sessions.c.root_session_id).where(sessions.c.id == session_id)).one()
    return [member.id for member in load(conn, root_of(row)).below(session_id)]


def children(conn: Connection, session_id: str) -> list[str]:
    """The sessions of a session's own sub-agents, oldest first."""
    below = select(sessions.c.id).where(sessions.c.parent_session_id == session_id)
    return list(conn.execute(below.order_by(sessions.c.id)).scalars())
