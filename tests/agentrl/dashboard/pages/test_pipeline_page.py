"""The page of the pipeline: the parts of steps, what bounds the run, what ran at the same time."""

from __future__ import annotations

from typing import Any

from history import History
from page_visits import HOSTILE, page, tables, text
from sqlalchemy import update

from agentrl.store import Database, events
from agentrl.store.tables import steps

TIMES = {
    "time/wait_for_batch": 4.0,
    "time/read": 0.5,
    "time/forward": 2.0,
    "time/train": 3.0,
    "time/checkpoint": 1.5,
    "time/write_version": 1.0,
}


def trained(db: Database, metrics: dict[str, Any] = TIMES, count: int = 2) -> History:
    history = History(db, seed=1)
    history.train(count)
    with db.write() as conn:
        conn.execute(update(steps).where(steps.c.run_id == history.run_id).values(metrics=metrics))
        for step in range(1, count + 1):
            at = 100.0 * step
            facts: dict[str, Any] = {"step": step, "version": step, "start": at, "end": at + 5, "updated": at + 3}
            events.record(conn, history.run_id, "train_step", facts, "trainer")
            facts = {"version": step, "start": at + 5, "end": at + 6, "stall_s": {"http://a": 0.2}}
            events.record(conn, history.run_id, "publish", facts, "proxy")
    return history


def test_the_page_says_what_bounds_the_run_and_where_the_time_goes(db: Database) -> None:
    trained(db)
    html = page(db, "/runs/test/pipeline")
    assert "The agents bound the run: the trainer waits for batches in 50% of a step's time" in text(html)
    found = tables(html)
    assert [row[0] for row in found["Mean seconds of a step"]] == [
        "wait for a batch", "read", "forward", "write the version", "checkpoint", "a step",
    ]  # fmt: skip
    assert found["Mean seconds of a step"][0][1:] == ["agents", "4.0 s", "50.0%"]
    newest = found["Seconds of the newest steps"]
    assert [row[0] for row in newest] == ["2", "1"]
    assert newest[0][1:7] == ["4.0 s", "0.5 s", "2.0 s", "1.0 s", "0.5 s", "0.2 s"]
    for said in ("engines stand still", "write the version, save", "step 1: wait for a batch 4.0 s"):
        assert said in html
    assert html.count('href="/ui/runs/test/steps/2"') >= 2


def test_what_was_not_measured_is_not_invented(db: Database) -> None:
    trained(db, {"time/train": 3.0})
    html = page(db, "/runs/test/pipeline")
    assert "The trainer bounds the run: its update takes 100% of a step's time" in text(html)
    assert "stands for the parts of an update that the trainer did not measure" in text(html)
    assert [row[0] for row in tables(html)["Mean seconds of a step"]] == ["train", "a step"]


def test_a_run_without_steps_says_what_is_missing(db: Database) -> None:
    History(db)
    assert "No step is measured yet" in text(page(db, "/runs/test/pipeline"))


def test_a_long_run_is_joined_to_few_columns(db: Database) -> None:
    history = trained(db)
    with db.write() as conn:
        rows = [dict(row._mapping) for row in conn.execute(steps.select().where(steps.c.run_id == history.run_id))]
        for number in range(3, 400):
            conn.execute(steps.insert().values(rows[-1] | {"id": f"{number:032x}", "step": number}))
    html = page(db, "/runs/test/pipeline")
    assert "or the mean of 4" in text(html)
    assert "step 1 to step 4: wait for a batch" in html
    assert len(html) < 300_000


def test_what_others_wrote_is_text(db: Database) -> None:
    history = trained(db)
    facts = {"step": HOSTILE, "version": HOSTILE, "start": 100.0, "end": 300.0, "stall_s": {HOSTILE: HOSTILE}}
    for kind in ("publish", "wait_for_batch", "checkpoint", "train_step"):
        db.transact(events.record, history.run_id, kind, facts, "proxy")
    page(db, "/runs/test/pipeline")
