"""Heartbeats: when each proxy replica and rollout worker of a run was last seen."""

from __future__ import annotations

import time
from typing import Literal

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.store.db import upsert
from agentrl.store.tables import heartbeats

Kind = Literal["proxy", "worker"]


def beat(conn: Connection, run_id: str, kind: Kind, name: str, about: Json | None = None) -> None:
    """Record that `name` is alive, and what it says about itself: its host, and what it does."""
    now = time.time()
    said = {"last_seen_at": now} if about is None else {"last_seen_at": now, "about": about}
    conn.execute(
        upsert.insert(conn, heartbeats)
        .values(run_id=run_id, kind=kind, name=name, started_at=now, **said)
        .on_conflict_do_update(index_elements=["run_id", "kind", "name"], set_=said)
    )


def last_seen(conn: Connection, run_id: str, kind: Kind, name: str) -> float:
    """The time at which `name` was last seen (seconds since the epoch); 0 if never."""
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


def of_run(conn: Connection, run_id: str, timeout_s: float) -> list[Json]:
    """The processes of a run that send heartbeats, with the end of the lease that each heartbeat renews."""
    rows = conn.execute(
        select(
            heartbeats.c.kind, heartbeats.c.name, heartbeats.c.started_at, heartbeats.c.last_seen_at, heartbeats.c.about
        )
        .where(heartbeats.c.run_id == run_id)
        .order_by(heartbeats.c.kind, heartbeats.c.name)
    )
    return [
        {
            "kind": row.kind,
            "name": row.name,
            "started_at": row.started_at,
            "last_seen_at": row.last_seen_at,
            "leased_until": row.last_seen_at + timeout_s,
            "about": row.about or {},
        }
        for row in rows
    ]
