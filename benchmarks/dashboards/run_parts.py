"""The rows of a generated run that are neither sampled nor trained: tasks, engines, heartbeats, events, keys."""

from __future__ import annotations

import random

from agentrl.domain import task_order
from agentrl.domain.schemas import Json
from agentrl.domain.task_order import BLOCK
from agentrl.store.db import codec

from .call_rows import ENGINES, REPLICAS
from .episode_texts import SOURCES, task
from .run_timeline import PUBLISHED, TRAINED, Ids, Timeline

RUN_KEY, ADMIN_KEY = "arl-run-of-the-generated-benchmark-run", "arl-admin-of-the-generated-benchmark-run"
REFUSALS = 200
Tables = dict[str, list[Json]]


def tasks(run_id: str, count: int, ids: Ids, at: float, seed: int) -> tuple[list[Json], list[Json]]:
    """The rows of `task_sources` and of `tasks`; every source has its share of `count`."""
    rng = random.Random(f"{seed}/tasks")
    total = sum(SOURCES.values())
    sources: list[Json] = []
    found: list[Json] = []
    for number, (name, weight) in enumerate(SOURCES.items()):
        stored = max(1, round(count * weight / total))
        facts = {
            "stored": stored,
            "rows_read": stored,
            "complete": True,
            "content": None,
            "block": BLOCK,
            "window": None,
        }
        sources.append({"run_id": run_id, "source": number, "name": name, "weight": weight, **facts})
        for k in range(stored):
            data = codec.json_text(task(k, name, rng))
            position = k * len(SOURCES) + number
            found.append({"id": ids.at(at), "run_id": run_id, "position": position, "data": data})
    return sources, found


def position_at(cursor: int, sources: list[Json], seed: int) -> int:
    """The position of the task that a place of the data cursor gets."""
    number, nth = task_order.pick(cursor, [source["weight"] for source in sources], seed)
    source = sources[number]
    place = task_order.position(
        nth, stored=source["stored"], complete=True, block=source["block"], key=f"{seed}/{number}"
    )
    assert place is not None
    return place * len(sources) + number


def fleet(run_id: str, timeline: Timeline) -> Tables:
    """Engines, of which the last is dead, and heartbeats of proxies and workers."""
    now = timeline.now
    members = [
        {
            "run_id": run_id,
            "url": url,
            "state": "dead" if url == ENGINES[-1] else "serving",
            "version": timeline.steps,
            "error": "no answer to three health checks" if url == ENGINES[-1] else None,
            "last_seen_at": now - (600 if url == ENGINES[-1] else 1),
            "draining": False,
            "updater": None,
            "updating_until": None,
            "leased_until": None,
            "own_key": False,
            "backend": "sglang",
            "changes": timeline.steps,
            "changed_at": now - 60,
            "seen_by": REPLICAS[0],
            "starting_until": None,
        }
        for url in ENGINES
    ]
    names = [("proxy", name) for name in REPLICAS] + [("worker", f"worker-{n}") for n in range(3)]
    beats = [
        {
            "run_id": run_id,
            "kind": kind,
            "name": name,
            "started_at": timeline.start,
            "last_seen_at": now - 2,
            "about": codec.json_text({"host": f"host-{n}", "pid": 1000 + n}),
        }
        for n, (kind, name) in enumerate(names)
    ]
    return {"engines": members, "heartbeats": beats}


def key_row(run_id: str, ids: Ids, at: float) -> Json:
    """The row of the admin key `ADMIN_KEY`."""
    return {
        "id": ids.at(at),
        "run_id": run_id,
        "session_id": None,
        "power": "admin",
        "name": "benchmark",
        "key_hash": codec.hash_key(ADMIN_KEY),
        "created_at": at,
        "changed_at": at,
        "expires_at": None,
        "revoked_at": None,
    }


def events(run_id: str, timeline: Timeline, sessions: list[str], ids: Ids, rng: random.Random) -> list[Json]:
    """The timeline of a run: its steps and publishes, refused calls of some `sessions`, engines and failures."""
    at = timeline.at
    found: list[tuple[float, str, str, Json]] = [
        (timeline.start + n, "engine_joined", "proxy-0", {"url": url}) for n, url in enumerate(ENGINES)
    ]
    for step in range(1, timeline.steps + 1):
        train = {"start": at(step), "end": at(step + TRAINED), "step": step, "version": step, "updated": at(step + 0.7)}
        publish = {"version": step, "start": at(step + TRAINED), "end": at(step + PUBLISHED), "transport": "disk"}
        publish |= {"engines": len(ENGINES), "stall_s": rng.uniform(0.1, 0.6)}
        waited = {"start": at(step - 0.1), "end": at(step), "step": step}
        found.append((waited["end"], "wait_for_batch", "trainer", waited))
        found.append((train["end"], "train_step", "trainer", train))
        saved = {"start": at(step + TRAINED - 0.05), "end": at(step + 1.2), "step": step, "bytes": 3 << 30}
        found.append((saved["end"], "checkpoint", "trainer", saved))
        found.append((publish["end"], "publish", "proxy", publish))
        waited = {"start": at(step + TRAINED), "end": at(step + PUBLISHED), "version": step}
        found.append((waited["end"], "wait_for_publish", "trainer", waited))
    for session_id in rng.sample(sessions, min(REFUSALS, len(sessions))):
        when = rng.uniform(timeline.start, timeline.now)
        refusal = {"session_id": session_id, "status": 422, "code": "unsupported_parameter", "param": "logit_bias"}
        refusal |= {"message": "logit_bias is not supported", "route": "/v1/chat/completions", "at": when}
        found.append((when, "refused", "proxy-0", refusal))
    for when in (0.3, 0.6, 0.9):
        found.append(
            (at(when * timeline.steps), "part_died", "rollout/0", {"part": "rollout", "rank": 0, "status": 137})
        )
    found.append((timeline.now - 600, "engine_left", "proxy-0", {"url": ENGINES[-1], "why": "its lease ended"}))
    return [
        {
            "id": ids.at(when),
            "run_id": run_id,
            "kind": kind,
            "source": source,
            "data": codec.json_text(data),
            "created_at": when,
        }
        for when, kind, source, data in sorted(found, key=lambda one: one[0])
    ]
