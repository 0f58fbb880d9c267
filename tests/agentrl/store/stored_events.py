"""Units that store events, and what is stored."""

from sqlalchemy import select

from agentrl.store import events

TIMEOUT_S = 30


def insert(conn, run_id, kind):
    events.record(conn, run_id, kind, {}, "test")
    return kind


def explode(conn, run_id):
    events.record(conn, run_id, "never", {}, "test")
    raise ValueError("boom")


def stored(db):
    with db.read() as conn:
        return [row.kind for row in conn.execute(select(events.events.c.kind).order_by(events.events.c.id))]
