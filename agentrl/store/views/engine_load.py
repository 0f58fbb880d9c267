"""What the engines of a run do: their running calls and their newest ones, the mismatch of their logprobs with the
trainer's, and how versions reached them.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import Json
from agentrl.store import engine_claims, part_ranks
from agentrl.store.tables import events, heartbeats, interactions
from agentrl.store.views import step_series

CALLS, PUBLISHES, PROCESSES, MOST_ENGINES, COMPARED_STEPS = 1000, 20, 200, 500, 20


def engines(conn: Connection, run_id: str) -> list[Json]:
    """The engines by URL, each with its running calls, figures of its calls among the newest CALLS (`load`), and its
    `mismatch`.
    """
    running = _running(conn, run_id)
    newest = _newest(conn, run_id)
    gaps = mismatch(conn, run_id, "engine")
    rows = sorted(engine_claims.of_run(conn, run_id), key=lambda row: str(row["url"]))[:MOST_ENGINES]
    return [
        row
        | {
            "running": running.get(row["url"], 0),
            "load": newest.get(row["url"]),
            "mismatch": gaps.get(urlsplit(row["url"]).netloc),
        }
        for row in rows
    ]


def mismatch(conn: Connection, run_id: str, kind: Literal["engine", "backend"]) -> dict[str, Json]:
    """Mean |engine − trainer| and number of tokens of each engine (HOST:PORT) or backend, over COMPARED_STEPS."""
    metrics = step_series.of_run(conn, run_id, newest=COMPARED_STEPS)["metrics"]
    prefix, found = f"mismatch/{kind}/", {}
    for name in (name for name in metrics if name.startswith(prefix)):
        label = name.removeprefix(prefix)
        counts = metrics[f"mismatch/{kind}_tokens/{label}"]
        tokens = sum(filter(None, counts))
        total = sum(mean * count for mean, count in zip(metrics[name], counts, strict=True) if count)
        found[label] = {"mean": total / tokens, "tokens": int(tokens)}
    return found


def unassigned(conn: Connection, run_id: str) -> int:
    """Running calls whose engine is recorded with their end."""
    return _running(conn, run_id).get(None, 0)


def _running(conn: Connection, run_id: str) -> dict[str | None, int]:
    rows = conn.execute(
        select(interactions.c.engine_url, func.count())
        .where(interactions.c.run_id == run_id, interactions.c.status == "running")
        .group_by(interactions.c.engine_url)
    )
    return {row[0]: row[1] for row in rows}


def _newest(conn: Connection, run_id: str) -> dict[str, Json]:
    c = interactions.c
    rows = conn.execute(
        select(c.engine_url, c.status, c.created_at, c.first_token_at, c.finished_at, c.output_tokens)
        .where(c.run_id == run_id)
        .order_by(c.id.desc())
        .limit(CALLS)
    )
    by_url: dict[str, list[Any]] = {}
    for row in rows:
        if row.engine_url is not None:
            by_url.setdefault(row.engine_url, []).append(row)
    return {url: _figures(calls) for url, calls in by_url.items()}


def _figures(calls: list[Any]) -> Json:
    first = [call.first_token_at - call.created_at for call in calls if call.first_token_at is not None]
    rates = [
        call.output_tokens / (call.finished_at - call.first_token_at)
        for call in calls
        if call.first_token_at is not None and call.finished_at is not None and call.finished_at > call.first_token_at
    ]
    return {
        "calls": len(calls),
        "failed": sum(call.status in ("failed", "lost") for call in calls),
        "first_token_s": median(first) if first else None,
        "tokens_per_s": median(rates) if rates else None,
    }


def publishes(conn: Connection, run_id: str) -> list[Json]:
    """The newest publishes: the facts of their events, and when each was recorded."""
    rows = conn.execute(
        select(events.c.data, events.c.created_at)
        .where(events.c.run_id == run_id, events.c.kind == "publish")
        .order_by(events.c.id.desc())
        .limit(PUBLISHES)
    )
    return [{**row.data, "at": row.created_at} for row in rows]


def replicas(conn: Connection, run_id: str) -> list[Json]:
    """Proxies and workers with their heartbeats, those seen last first."""
    h = heartbeats.c
    rows = conn.execute(
        select(h.kind, h.name, h.started_at, h.last_seen_at, h.about)
        .where(h.run_id == run_id)
        .order_by(h.last_seen_at.desc(), h.name)
        .limit(PROCESSES)
    )
    return [dict(row._mapping) for row in rows]


def processes(conn: Connection, run_id: str) -> list[Json]:
    """The processes that a scheduler has placed, and why parts were given up."""
    failures = part_ranks.failures(conn, run_id)
    return [
        {
            "part": rank.part,
            "rank": rank.rank,
            "host": rank.host,
            "state": rank.state if rank.live or rank.state == "ended" else "lost",
            "pid": rank.pid,
            "status": rank.status,
            "starts": rank.starts,
            "failure": failures.get(rank.part),
        }
        for rank in part_ranks.ranks(conn, run_id)[:PROCESSES]
    ]
