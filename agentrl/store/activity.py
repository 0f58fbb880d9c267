"""Current figures of a run, for `agentrl status` and `/metrics`; every replica reports the same."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import TRAINED, Json, SessionStatus
from agentrl.store import evaluation_episodes, part_ranks, runs
from agentrl.store.db import codec
from agentrl.store.events import TRAINER_STARTED, newest_of
from agentrl.store.sessions import task_skips
from agentrl.store.sessions.ends import trace_outbox
from agentrl.store.tables import engines, events, heartbeats, interactions, sessions, steps
from agentrl.store.training import checkpoint_rows

LATEST_EVENTS = 5
LATEST_ERRORS = 3


def of_run(conn: Connection, run_id: str, window_s: float) -> Json:
    """The run, its newest step, evaluations, engines and replicas, and its calls of the last `window_s` seconds."""
    return {
        **facts(conn, run_id),
        "evaluations": [found.as_json() for found in evaluation_episodes.newest(conn, runs.get(conn, run_id))],
        "calls": calls(conn, run_id, window_s),
        **_latest(conn, run_id),
    }


def facts(conn: Connection, run_id: str) -> Json:
    """The run's position and parts; reads a few rows, whatever the run's size."""
    run = runs.get(conn, run_id)
    step = conn.execute(
        select(steps.c.step, steps.c.state, steps.c.staleness_max, steps.c.return_mean, steps.c.wasted_tokens)
        .where(steps.c.run_id == run_id, steps.c.state.in_(TRAINED))
        .order_by(steps.c.id.desc())
        .limit(1)
    ).first()
    pool = conn.execute(select(engines).where(engines.c.run_id == run_id).order_by(engines.c.url))
    replicas = conn.execute(
        select(heartbeats.c.kind, heartbeats.c.name, heartbeats.c.last_seen_at, heartbeats.c.about)
        .where(heartbeats.c.run_id == run_id)
        .order_by(heartbeats.c.kind, heartbeats.c.name)
    )
    alive = conn.execute(
        select(sessions.c.status, func.count())
        .where(sessions.c.run_id == run_id, sessions.c.built.is_(False))
        .group_by(sessions.c.status)
    )
    started = newest_of(conn, run_id, TRAINER_STARTED)
    in_flight = conn.execute(
        select(func.count()).where(interactions.c.run_id == run_id, interactions.c.status == "running")
    ).scalar_one()
    by_status = {row[0]: row[1] for row in alive}
    return {
        "run": {
            "id": run.id,
            "name": run.name,
            "status": run.status,
            "error": run.error,
            "version": run.current_version,
            "published_step": run.published_step,
            "target_steps": run.target_steps,
            "admitted_groups": run.admitted,
            "returned_groups": run.returned,
            "running_groups": run.running,
            "ready_groups": runs.ready_groups(conn, run_id),
            "skipped_tasks": task_skips.count(conn, run_id),
        },
        "trainer": None if started is None else {k: v for k, v in started.data.items() if k not in ("start", "end")},
        "step": None if step is None else dict(step._mapping),
        "checkpoint": checkpoint_rows.newest(conn, run_id),
        "engines": [{k: row._mapping[k] for k in ("url", "state", "version", "error", "last_seen_at")} for row in pool],
        "replicas": [dict(row._mapping) for row in replicas],
        "processes": [_process(rank) for rank in part_ranks.ranks(conn, run_id)],
        "sessions": {"open": by_status.get(SessionStatus.OPEN, 0), "closing": by_status.get(SessionStatus.CLOSING, 0)},
        "in_flight": in_flight,
        "unsent_traces": trace_outbox.waiting(conn, run_id),
    }


def _process(rank: part_ranks.Rank) -> Json:
    """A process that a scheduler has placed. It is `lost` when its runner has not renewed its lease."""
    state = rank.state if rank.live or rank.state == "ended" else "lost"
    return {"host": rank.host, "part": rank.part, "rank": rank.rank, "state": state, "starts": rank.starts}


def calls(conn: Connection, run_id: str, window_s: float) -> Json:
    """The calls that began in the last `window_s` seconds, added up; latencies in seconds, of the finished ones."""
    since = time.time() - window_s
    c = interactions.c
    rows = conn.execute(
        select(
            c.status,
            c.fork_reason,
            c.bridged,
            c.prompt_tokens,
            c.cached_tokens,
            c.output_tokens,
            c.created_at,
            c.first_token_at,
            c.finished_at,
            c.options,
        ).where(c.id >= codec.first_id(since), c.run_id == run_id, c.created_at >= since)
    ).all()
    statuses: Counter[str] = Counter()
    forks: Counter[str] = Counter()
    prompt = cached = output = retries = bridges = 0
    whole: list[float] = []
    first: list[float] = []
    for status, fork, bridged, n_prompt, n_cached, n_output, created_at, first_at, finished_at, options in rows:
        statuses[status] += 1
        bridges += bool(bridged)
        if fork is not None:
            forks[fork] += 1
        if options and options.get("retry"):
            retries += 1
        if status == "complete" and finished_at is not None:
            prompt += n_prompt
            cached += n_cached or 0
            output += n_output
            whole.append(finished_at - created_at)
            if first_at is not None:
                first.append(first_at - created_at)
    whole.sort()
    first.sort()
    return {
        "window_s": window_s,
        "per_s": len(rows) / window_s,
        "prompt_tokens_per_s": prompt / window_s,
        "cached_tokens_per_s": cached / window_s,
        "output_tokens_per_s": output / window_s,
        "by_status": dict(statuses),
        "forks": dict(forks),
        "retries": retries,  # retries that had to be sampled again
        "bridged": bridges,
        "latency_s": {"p50": percentile(whole, 0.5), "p95": percentile(whole, 0.95)},
        "first_token_s": {"p50": percentile(first, 0.5), "p95": percentile(first, 0.95)},
    }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The quantile `share` (0 to 1, nearest rank) of an ascending sequence; None for an empty one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _latest(conn: Connection, run_id: str) -> Json:
    """The newest events and failed calls, newest first."""
    timeline = conn.execute(
        select(events.c.kind, events.c.source, events.c.data, events.c.created_at)
        .where(events.c.run_id == run_id)
        .order_by(events.c.id.desc())
        .limit(LATEST_EVENTS)
    )
    since = codec.first_id(time.time() - 3600)
    failed = conn.execute(
        select(interactions.c.id, interactions.c.status, interactions.c.error, interactions.c.created_at)
        .where(interactions.c.id >= since, interactions.c.run_id == run_id, interactions.c.error.is_not(None))
        .order_by(interactions.c.id.desc())
        .limit(LATEST_ERRORS)
    )
    return {
        "events": [dict(row._mapping) for row in timeline],
        "errors": [dict(row._mapping) for row in failed],
    }


def total_output_tokens(conn: Connection, run_id: str) -> int:
    """All tokens that the run has sampled; reads every call."""
    return int(
        conn.execute(
            select(func.coalesce(func.sum(interactions.c.output_tokens), 0)).where(interactions.c.run_id == run_id)
        ).scalar_one()
    )


def output_tokens_per_s(conn: Connection, run_id: str, window_s: float, longest_call_s: float) -> float:
    """Tokens sampled per second by calls that ended in the last `window_s` and took at most about `longest_call_s`.

    Ids sort by time, so older calls are not read.
    """
    now = time.time()
    tokens = conn.execute(
        select(func.coalesce(func.sum(interactions.c.output_tokens), 0)).where(
            interactions.c.id > codec.first_id(now - longest_call_s),
            interactions.c.run_id == run_id,
            interactions.c.finished_at > now - window_s,
        )
    ).scalar_one()
    return float(tokens) / window_s
