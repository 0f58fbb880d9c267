"""The pipeline of a run from its rows: parts of steps, stalls of engines, and what ran when."""

from __future__ import annotations

from typing import Any

import pytest
from history import History
from sqlalchemy import Connection, select, update

from agentrl.store import Database, events
from agentrl.store.tables import interactions, steps
from agentrl.store.views.results import step_pipeline

TIMES = {"time/wait_for_batch": 4.0, "time/forward": 2.0, "time/backward": 3.0, "time/train": 5.0}


def measure(history: History, **kinds: list[dict[str, Any]]) -> None:
    """Give every step its times, and the run events."""

    def unit(conn: Connection) -> None:
        conn.execute(update(steps).where(steps.c.run_id == history.run_id).values(metrics=TIMES))
        for kind, found in kinds.items():
            for data in found:
                events.record(conn, history.run_id, kind, data, "trainer")

    history.db.transact(unit)


def lanes(found: list[dict[str, Any]], lane: str) -> list[tuple[str, float, float]]:
    return [(one["kind"], one["start"], one["end"]) for one in found if one["lane"] == lane]


def test_steps_have_their_parts_and_the_longest_stall(db: Database) -> None:
    history = History(db, seed=1)
    history.train(2)
    measure(
        history,
        train_step=[
            {"step": n, "version": n, "start": 10.0 * n, "end": 10.0 * n + 6, "updated": 10.0 * n + 5} for n in (1, 2)
        ],
        publish=[
            {"version": 1, "start": 16.0, "end": 18.0, "stall_s": {"http://a": 0.5, "http://b": 1.5}},
            {"version": 7, "start": 16.0, "end": 18.0, "stall_s": 9.0},
        ],
    )
    found = db.query(step_pipeline.of_run, history.run_id)
    assert [(one["step"], one["stall_s"]) for one in found["steps"]] == [(1, 1.5), (2, None)]
    assert found["steps"][0]["parts"] == {"wait_for_batch": 4.0, "forward": 2.0, "backward": 3.0}
    assert found["means"] == found["steps"][0]["parts"]
    assert (found["bound"]["stage"], found["bound"]["share"]) == ("trainer", pytest.approx(5 / 9))


def test_what_ran_at_the_same_time_is_shown_by_lane(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    measure(
        history,
        wait_for_batch=[{"step": 1, "start": 6.0, "end": 10.0}],
        train_step=[{"step": 1, "version": 1, "start": 10.0, "end": 16.0, "updated": 15.0}],
        checkpoint=[{"step": 1, "start": 15.0, "end": 30.0}],
        publish=[{"version": 1, "start": 16.0, "end": 18.0, "stall_s": 0.5}],
        wait_for_publish=[{"version": 1, "start": 16.0, "end": 18.0}],
    )
    with db.write() as conn:
        first = conn.execute(select(interactions.c.id).limit(2)).scalars().all()
        conn.execute(update(interactions).values(created_at=100.0, finished_at=101.0))  # after the newest event
        conn.execute(update(interactions).where(interactions.c.id == first[0]).values(created_at=5.0, finished_at=9.0))
        conn.execute(update(interactions).where(interactions.c.id == first[1]).values(created_at=8.0, finished_at=None))
    spans = db.query(step_pipeline.of_run, history.run_id)["spans"]
    assert lanes(spans, "trainer") == [
        ("wait_for_batch", 6.0, 10.0), ("train", 10.0, 15.0), ("save", 15.0, 16.0), ("wait_for_publish", 16.0, 18.0),
    ]  # fmt: skip
    assert lanes(spans, "checkpoints") == [("checkpoint", 15.0, 30.0)]
    assert lanes(spans, "publish") == [("publish", 16.0, 18.0)]
    assert lanes(spans, "engines") == [("stall", 17.5, 18.0)]
    assert lanes(spans, "agents") == [("calls", 5.0, 30.0)]  # joined; the second call still runs


def test_a_run_without_steps_and_one_with_broken_events_have_no_pipeline(db: Database) -> None:
    history = History(db, seed=1)
    empty: dict[str, Any] = {"steps": [], "means": {}, "bound": None, "spans": []}
    assert db.query(step_pipeline.of_run, history.run_id) == empty
    broken: list[dict[str, Any]] = [
        {"start": 2.0, "end": 1.0},
        {"start": "a", "end": 3},
        {"step": 1},
        {"start": -1.0, "end": 2},
    ]
    measure(history, train_step=broken, publish=broken)
    assert db.query(step_pipeline.of_run, history.run_id) == empty
