"""The sessions whose spans wait to be sent to a receiver of traces.

absent ── add, with the session's build ──► due ── claim ──► claimed ── sent ──► absent
                                             ▲                  │
                                             └── release, or its time is over ──┘

A session is added in the transaction that builds it, so none is forgotten. While one sender has claimed a session, no
other sends it. Times are by the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, select, update

from agentrl.store.db import clock, upsert
from agentrl.store.tables import unsent_traces

MOST_COUNTED = 10_000
"""Maximum of `waiting`, so that a scrape stays short."""


def add(conn: Connection, run_id: str, session_id: str) -> None:
    """Let a built session wait. Safe to repeat."""
    row = {"session_id": session_id, "run_id": run_id, "due_at": 0.0}
    conn.execute(upsert.insert(conn, unsent_traces).values(row).on_conflict_do_nothing())


def claim(conn: Connection, run_id: str, most: int, for_s: float) -> list[str]:
    """Take at most `most` due sessions, those that waited longest first; for `for_s`, no other sender gets them."""
    c = unsent_traces.c
    due = (
        select(c.session_id)
        .where(c.run_id == run_id, c.due_at <= clock.now())
        .order_by(c.due_at, c.session_id)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    found = list(conn.execute(due).scalars())
    conn.execute(update(unsent_traces).where(c.session_id.in_(found)).values(due_at=clock.now() + for_s))
    return found


def release(conn: Connection, session_ids: Sequence[str]) -> None:
    """Make claimed sessions due again, before new ones."""
    conn.execute(update(unsent_traces).where(unsent_traces.c.session_id.in_(session_ids)).values(due_at=0.0))


def sent(conn: Connection, session_ids: Sequence[str]) -> None:
    """The spans of these sessions were sent, or never can be."""
    conn.execute(delete(unsent_traces).where(unsent_traces.c.session_id.in_(session_ids)))


def is_due(conn: Connection, run_id: str) -> bool:
    """Whether a session can be claimed."""
    due = select(unsent_traces.c.session_id).where(
        unsent_traces.c.run_id == run_id, unsent_traces.c.due_at <= clock.now()
    )
    return conn.execute(due.limit(1)).first() is not None


def waiting(conn: Connection, run_id: str) -> int:
    """How many sessions wait, claimed ones included; at most MOST_COUNTED."""
    found = select(unsent_traces.c.session_id).where(unsent_traces.c.run_id == run_id).limit(MOST_COUNTED).subquery()
    return int(conn.execute(select(func.count()).select_from(found)).scalar_one())
