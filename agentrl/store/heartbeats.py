"""Heartbeats: when each proxy replica and rollout worker of a run was last seen."""

from __future__ import annotations

import time
from typing import Literal

from sqlalchemy import Connection, select

from agentrl.store.db import upsert
from agentrl.store.tables import heartbeats

Kind = Literal["proxy", "worker"]


def beat(conn: Connection, run_id: str, kind: Kind, name: str) -> None:
    """Record that `name` is alive."""
    now = time.time()
    conn.execute(
        upsert.insert(conn, heartbeats)
        .values(run_id=run_id, kind=kind, name=name, started_at=now, last_seen_at=now)
        .on_conflict_do_update(index_elements=["run_id", "kind", "name"], set_={"last_seen_at": now})
    )


def last_seen(conn: Connection, run_id: str, kind: Kind, name: str) -> float:
    """When `name` was last seen (seconds since the epoch); 0 if never."""
    seen = conn.execute(
        select(heartbeats.c.last_seen_at).where(
            heartbeats.c.run_id == run_id, heartbeats.c.kind == kind, heartbeats.c.name == name
        )
    ).scalar()
    return float(seen or 0.0)


def silent(conn: Connection, run_id: str, kind: Kind, since: float) -> list[str]:
    """The names that were last seen before `since`."""
    return list(
        conn.execute(
            select(heartbeats.c.name).where(
                heartbeats.c.run_id == run_id, heartbeats.c.kind == kind, heartbeats.c.last_seen_at < since
            )
        ).scalars()
    )
