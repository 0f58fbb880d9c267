"""Row locks of sessions and groups, in one order that every transaction keeps.

Order: root session, sessions below it from the top, group, run. A transaction that opens or ends a session of a tree
holds the root. SQLite ignores FOR UPDATE: there the writing transaction holds the whole database.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.errors import no_session
from agentrl.store.tables import groups, sessions


def lock(conn: Connection, session_id: str) -> Row[Any]:
    """The session, locked. Raises RequestError 404."""
    row = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update(key_share=True)).first()
    if row is None:
        raise no_session(session_id)
    return row


def lock_in_tree(conn: Connection, session_id: str) -> Row[Any]:
    """The session, locked after its root, so that the tree does not change. Raises RequestError 404."""
    root_id = conn.execute(select(sessions.c.root_session_id).where(sessions.c.id == session_id)).scalar()
    if root_id is not None:
        lock(conn, root_id)
    return lock(conn, session_id)


def lock_all(conn: Connection, session_ids: list[str]) -> list[Row[Any]]:
    """Lock sessions of a tree, parents before children."""
    if not session_ids:
        return []
    of_them = select(sessions).where(sessions.c.id.in_(session_ids)).order_by(sessions.c.depth, sessions.c.id)
    return list(conn.execute(of_them.with_for_update(key_share=True)))


def lock_ids(conn: Connection, session_ids: list[str]) -> None:
    """Lock sessions as `lock_all` does, without reading the rows."""
    if session_ids:
        of_them = select(sessions.c.id).where(sessions.c.id.in_(session_ids)).order_by(sessions.c.depth, sessions.c.id)
        conn.execute(of_them.with_for_update(key_share=True)).all()


def lock_group(conn: Connection, group_id: str) -> Row[Any]:
    """The group, locked: after sessions, before the run."""
    return conn.execute(select(groups).where(groups.c.id == group_id).with_for_update(key_share=True)).one()
