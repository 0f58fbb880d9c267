"""The open sessions that a worker's earlier instances left behind."""

from __future__ import annotations

from sqlalchemy import Connection, select

from agentrl.store.sessions import session_lookup
from agentrl.store.tables import groups


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
    return [(session_id, other) for other in others for session_id in session_lookup.open_of_owner(conn, run_id, other)]
