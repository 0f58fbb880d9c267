"""The list of steps: newest first, rolled back ones marked, a page at a time."""

from __future__ import annotations

import re

import pytest
from history import History
from page_visits import links, page, tables, text, visit
from sqlalchemy import update

from agentrl.dashboard.page_rendering import number
from agentrl.store import Database
from agentrl.store.tables import steps
from agentrl.store.views.results import step_rows


@pytest.mark.long_on("postgresql")
def test_steps_are_listed_newest_first_with_their_figures(db: Database) -> None:
    history = History(db, seed=1)
    history.train(3)
    metrics = {"logprob_mismatch_mean_abs": 0.25, "entropy": 1.5}
    with db.write() as conn:
        conn.execute(update(steps).where(steps.c.step == 3).values(metrics=metrics, trained_at=steps.c.started_at + 90))
    rows = tables(page(db, "/runs/test/steps"))["Steps"]
    assert [row[0] for row in rows] == ["3", "2", "1"]
    stored = {row["step"]: row for row in db.query(step_rows.page, history.run_id)}
    step = stored[3]
    assert rows[0][:11] == [
        "3", "published", number(step["return_mean"]), "2", str(step["trajectories"]), number(step["tokens_trained"]),
        f"{step['staleness_max']} of 1", "0.2500", "1.500", "1 min 30 s", "2 → 3",
    ]  # fmt: skip
    assert rows[2][7:9] == ["–", "–"]


def test_a_step_that_was_rolled_back_is_marked_and_leads_to_its_attempt(db: Database) -> None:
    history = History(db, seed=1)
    history.train(3)
    history.go_back(1)
    history.train(1)
    html = page(db, "/runs/test/steps")
    rows = tables(html)["Steps"]
    assert [row[:2] for row in rows] == [
        ["2", "published"], ["3", "rolled back"], ["2", "rolled back"], ["1", "published"],
    ]  # fmt: skip
    assert html.count('<tr class="undone">') == 2
    attempts = [href for href in links(html) if "attempt=" in href]
    assert len(attempts) == 2
    for href in attempts:
        assert "rolled back" in page(db, href.removeprefix("/ui"))


def test_pages_of_steps_have_each_step_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rows, "PAGE", 2)
    History(db, name="other", seed=9).train(1)
    History(db, seed=1).train(5)
    path, seen = "/runs/test/steps", []
    for _ in range(3):
        html = page(db, path)
        seen += [row[0] for row in tables(html)["Steps"]]
        older = [href for href in links(html) if "before=" in href]
        path = older[0].removeprefix("/ui") if older else ""
    assert seen == ["5", "4", "3", "2", "1"]
    assert path == ""


def test_a_run_without_steps_says_when_the_first_one_begins(db: Database) -> None:
    History(db)
    html = page(db, "/runs/test/steps")
    assert "No step has begun yet" in text(html)
    assert re.search(r'id="live-steps"', html)


def test_a_place_that_is_too_long_is_refused_by_name(db: Database) -> None:
    History(db)
    found = visit(db, f"/runs/test/steps?before={'x' * 201}")
    assert found.status_code == 400
    assert "before" in found.text
    assert visit(db, "/runs/nobody/steps").status_code == 404
