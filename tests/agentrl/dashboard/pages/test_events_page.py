"""The timeline of a run: newest first, by kind, a page at a time."""

from __future__ import annotations

import pytest
from history import History
from page_visits import HOSTILE, links, page, tables, text, visit

from agentrl.store import Database, events
from agentrl.store.views import event_pages


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=1)
    other = History(db, name="other", seed=2)
    for n in range(3):
        db.transact(events.record, made.run_id, "part_died", {"part": "rollout", "rank": n}, "rollout/0")
        db.transact(events.record, other.run_id, "elsewhere", {}, "x")
    db.transact(events.record, made.run_id, "train_step", {"start": 10.0, "end": 70.0, "step": 4}, "trainer")
    db.transact(events.record, made.run_id, "refused", {"session_id": "ab/c", "status": 422}, "proxy-0")
    return made


def test_events_are_listed_newest_first_with_their_facts(history: History, db: Database) -> None:
    html = page(db, "/runs/test/events")
    rows = tables(html)["Events"]
    assert [row[1] for row in rows] == ["refused", "train step", "part died", "part died", "part died"]
    assert [row[2] for row in rows[:3]] == ["proxy-0", "trainer", "rollout/0"]
    assert rows[1][3] == "1 min"
    assert rows[1][4].startswith('{"step": 4}')
    assert "&#34;rank&#34;: 2" in html
    assert {"/ui/sessions/ab%2Fc", "/ui/runs/test/steps/4"} <= set(links(html))


def test_events_of_one_kind(history: History, db: Database) -> None:
    html = page(db, "/runs/test/events")
    kinds = [href for href in links(html) if "kind=" in href]
    assert kinds == [f"/ui/runs/test/events?kind={kind}" for kind in ("part_died", "refused", "train_step")]
    rows = tables(page(db, kinds[0].removeprefix("/ui")))["Events"]
    assert [row[1] for row in rows] == ["part died"] * 3
    assert "No event of this kind" in text(page(db, "/runs/test/events?kind=elsewhere"))


def test_pages_of_events_have_each_event_once(history: History, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pages, "PAGE", 2)
    path, seen = "/runs/test/events?kind=part_died", []
    for _ in range(2):
        html = page(db, path)
        seen += [row[4] for row in tables(html)["Events"]]
        path = next((href.removeprefix("/ui") for href in links(html) if "before=" in href), "")
    assert [f'"rank": {n}' in told for n, told in zip((2, 1, 0), seen, strict=True)] == [True] * 3


def test_a_run_without_events_says_what_will_be_here(db: Database) -> None:
    History(db)
    assert "No event yet" in text(page(db, "/runs/test/events"))


def test_what_others_wrote_is_text(db: Database) -> None:
    history = History(db)
    data = {"start": HOSTILE, "end": 1.0, "step": HOSTILE, "session_id": HOSTILE, HOSTILE: [HOSTILE, 10 * HOSTILE]}
    db.transact(events.record, history.run_id, HOSTILE[:50], data, HOSTILE[:90])
    db.transact(events.record, history.run_id, "long", {"text": "x" * 100_000}, "proxy")
    html = page(db, "/runs/test/events")
    assert html.count("{{ 7777 * 7777 }}") > 4
    assert "more characters" in html
    assert len(html) < 60_000
    kind = next(href for href in links(html) if "kind=" in href and "script" in href)
    assert len(tables(page(db, kind.removeprefix("/ui")))["Events"]) == 1


@pytest.mark.parametrize("name", ["kind", "before"])
def test_a_bad_parameter_is_refused_by_name(db: Database, name: str) -> None:
    History(db)
    found = visit(db, f"/runs/test/events?{name}={'x' * 201}")
    assert found.status_code == 400
    assert name in found.text
