"""The engines of a run: which are behind, what they do, how versions reached them, and the processes beside them."""

from __future__ import annotations

import time

from history import History
from page_visits import HOSTILE, page, tables, text
from sqlalchemy import insert, update

from agentrl.store import Database, events
from agentrl.store.tables import engines, heartbeats, interactions, part_ranks, parts, steps

OF_ALL = {"last_seen_at": 100.0, "changes": 0, "changed_at": 0.0}


def add_engine(db: Database, run_id: str, url: str, **values: object) -> None:
    with db.write() as conn:
        conn.execute(insert(engines).values(run_id=run_id, url=url, **{"state": "serving", **OF_ALL, **values}))


def test_engines_are_listed_with_their_state_and_load(db: Database) -> None:
    history = History(db, seed=1)
    history.train(2)
    add_engine(db, history.run_id, "http://a", version=2, backend="sglang")
    add_engine(db, history.run_id, "http://b", version=0, draining=True, backend="vllm")
    add_engine(db, history.run_id, "http://c", state="dead", error="no answer")
    with db.write() as conn:
        begun = {"engine_url": "http://a", "first_token_at": interactions.c.created_at + 2.0}
        conn.execute(update(interactions).values(**begun, finished_at=interactions.c.created_at + 3.0, output_tokens=8))
        newest = conn.execute(interactions.select().order_by(interactions.c.id.desc()).limit(2)).all()
        conn.execute(update(interactions).where(interactions.c.id == newest[0].id).values(status="running"))
        lost = {"status": "running", "engine_url": None}
        conn.execute(update(interactions).where(interactions.c.id == newest[1].id).values(lost))
    html = page(db, "/runs/test/engines")
    rows = tables(html)["Engines"]
    assert [row[0] for row in rows] == ["http://a", "http://b", "http://c"]
    assert [row[1] for row in rows] == ["sglang", "vllm", "–"]
    assert [row[2] for row in rows] == ["serving", "serving draining", "deadno answer"]
    assert [row[3] for row in rows] == ["2", "0 2 behind", "–"]
    assert [row[4] for row in rows] == ["1", "0", "0"]
    assert rows[0][6:9] == ["2.0 s", "8", "–"]
    assert "1 running call: the engine of a call is recorded" in text(html)


def test_engines_and_backends_are_listed_with_their_mismatch(db: Database) -> None:
    """Means over steps, weighted by tokens; a step may lack an engine."""
    history = History(db, seed=1)
    history.train(2)
    for url, backend in (("http://a:1", "sglang"), ("http://b:2", "vllm"), ("http://c:3", "vllm")):
        add_engine(db, history.run_id, url, version=2, backend=backend)
    found = [
        {"engine/a:1": (0.01, 10), "engine/b:2": (0.25, 30), "backend/sglang": (0.01, 10), "backend/vllm": (0.25, 30)},
        {"engine/b:2": (0.05, 10), "backend/vllm": (0.05, 10)},
    ]
    with db.write() as conn:
        for step, gaps in enumerate(found, 1):
            metrics = {f"mismatch/{name}": mean for name, (mean, _) in gaps.items()}
            metrics |= {f"mismatch/{name.replace('/', '_tokens/')}": float(n) for name, (_, n) in gaps.items()}
            conn.execute(update(steps).where(steps.c.step == step).values(metrics=metrics))
    html = page(db, "/runs/test/engines")
    assert [row[8] for row in tables(html)["Engines"]] == ["0.01000", "0.2000", "–"]
    assert "Mismatch by backend: sglang 0.01000 (10 tokens), vllm 0.2000 (40 tokens)." in text(html)


def test_publishes_have_a_row_for_each_engine(db: Database) -> None:
    history = History(db, seed=1)
    facts = {
        "version": 1, "start": 10.0, "end": 12.5, "bytes": 1000, "stall_s": {"http://a": 0.5, "http://b": 1.5},
        "stall_steps": {"http://a": 1.25}, "transport": {"http://a": "prepared", "http://b": "disk"},
        "verified": {"http://a": 7, "http://b": 0},
        "unverified": {"http://b": "it has two ranks"},
    }  # fmt: skip
    db.transact(events.record, history.run_id, "publish", facts, "proxy")
    db.transact(events.record, history.run_id, "publish", {"version": 2, "stall_s": 0.25, "transport": "disk"}, "proxy")
    rows = tables(page(db, "/runs/test/engines"))["Published versions"]
    assert rows[0][0] == "2"
    assert rows[0][4:] == ["all engines", "0.2 s", "disk", "–"]
    assert rows[1][0] == "1"
    assert rows[1][2:] == ["2.5 s", "1000", "http://a", "0.5 s (1.2 decode steps)", "prepared", "7 tensors"]
    assert rows[2] == ["http://b", "1.5 s", "disk", "no: it has two ranks"]


def test_processes_are_listed_and_silent_ones_marked(db: Database) -> None:
    history = History(db, seed=1)
    history.beat("worker-a")
    with db.write() as conn:
        old = {"kind": "proxy", "name": "proxy-a", "started_at": 1.0, "last_seen_at": 2.0, "about": {"host": "h"}}
        conn.execute(insert(heartbeats).values(run_id=history.run_id, **old))
        part = {"name": "trainer", "spec": {}, "wanted": "running", "attempt": 1, "deaths": [], "failure": "it died"}
        conn.execute(insert(parts).values(run_id=history.run_id, **part))
        rank = {
            "part": "trainer", "rank": 0, "runner": "r", "host": "host-1", "address": "a", "state": "running",
            "ports": {}, "pid": 7, "starts": 3, "claimed_at": 1.0, "leased_until": 2.0,
        }  # fmt: skip
        conn.execute(insert(part_ranks).values(run_id=history.run_id, **rank))
    found = tables(page(db, "/runs/test/engines"))
    assert [row[0] for row in found["Proxies and workers"]] == ["worker-a", "proxy-a"]
    assert [row[2].endswith("silent") for row in found["Proxies and workers"]] == [False, True]
    assert found["Processes that a scheduler has placed"] == [
        ["trainer/0", "host-1", "lost", "7", "–", "3", "it died"],
    ]


def test_an_empty_run_says_what_is_missing(db: Database) -> None:
    History(db)
    html = text(page(db, "/runs/test/engines"))
    for said in ("The run has no engine", "No version is published yet", "has sent a heartbeat"):
        assert said in html


def test_what_others_wrote_is_text(db: Database) -> None:
    history = History(db, seed=1)
    add_engine(db, history.run_id, HOSTILE, error=HOSTILE, updater=HOSTILE[:90])
    facts = {
        "version": HOSTILE,
        "transport": {HOSTILE: HOSTILE},
        "stall_steps": {HOSTILE: HOSTILE},
        "unverified": {HOSTILE: HOSTILE},
        "bytes": HOSTILE,
    }
    db.transact(events.record, history.run_id, "publish", facts, "proxy")
    with db.write() as conn:
        seen = {"kind": "worker", "name": HOSTILE[:90], "started_at": 1.0, "last_seen_at": time.time()}
        conn.execute(insert(heartbeats).values(run_id=history.run_id, **seen, about={HOSTILE: HOSTILE}))
    assert page(db, "/runs/test/engines").count("{{ 7777 * 7777 }}") > 4
