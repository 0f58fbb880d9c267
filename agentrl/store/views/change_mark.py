"""A mark of a run that differs after something that a page shows has changed; read each second while pages are open."""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, func, select

from agentrl.store.tables import engines, events, interactions, rewards, runs, sessions, steps


def of_run(conn: Connection, run_id: str) -> str:
    """The mark. Ids grow with time, so the newest of a table is its end, found without a scan."""
    run = conn.execute(
        select(
            runs.c.status,
            runs.c.current_version,
            runs.c.published_step,
            runs.c.admitted,
            runs.c.returned,
            runs.c.running,
            runs.c.target_steps,
        ).where(runs.c.id == run_id)
    ).first()
    newest = [conn.execute(select(func.max(table.c.id))).scalar() for table in (events, interactions, rewards, steps)]
    unbuilt = conn.execute(
        select(func.count(), func.sum(sessions.c.seq)).where(sessions.c.run_id == run_id, sessions.c.built.is_(False))
    ).one()
    pool = conn.execute(select(func.count(), func.sum(engines.c.changes)).where(engines.c.run_id == run_id)).one()
    facts = (run and tuple(run), newest, [int(n or 0) for n in (*unbuilt, *pool)])
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
