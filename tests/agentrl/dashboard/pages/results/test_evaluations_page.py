"""The evaluations of a run: means with intervals, and the episodes of one beside those of another."""

from __future__ import annotations

import pytest
from history import LIMITS, History
from page_visits import HOSTILE, links, page, tables, text, visit
from sqlalchemy import update

from agentrl.dashboard.page_rendering import number
from agentrl.dashboard.pages.results import evaluation_changes
from agentrl.domain.evaluation import Episode, Label
from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, evaluation_episodes
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import sessions
from agentrl.store.training import rewards
from agentrl.store.views.results import evaluation_rows

STEPS, EPISODES = "Evaluations by step", "Episodes of both evaluations"


def evaluate(
    history: History, by_task: list[float | None], *, setting: str = "greedy", source: str | None = None
) -> list[str]:
    """Evaluate the present version: an episode of each task with this reward; None: one that fails. Their sessions."""
    found = []
    for index, reward in enumerate(by_task):
        label = Label(history.step, history.version, Episode(setting, index, 0), len(by_task), source)
        with history.db.write() as conn:
            new = group_starts.start_evaluation(
                conn, history.run_id, LIMITS, [codec.new_id()], {"q": index}, label.metadata, None
            )
            (session_id,) = new.session_ids
            history.play(conn, session_id, reward=False)
            if reward is not None:
                rewards.add(conn, session_id, value=reward, discount=1.0)
            status = SessionStatus.FAILED if reward is None else SessionStatus.COMPLETED
            sealing.end(conn, session_id, status, None, LIMITS)
        found.append(session_id)
    return found


def test_evaluations_are_listed_newest_first_with_their_intervals(db: Database) -> None:
    history = History(db, seed=1)
    evaluate(history, [0.0, 1.0, 0.0], source="sums")
    history.train(2)
    evaluate(history, [1.0, 1.0, 0.0], source="sums")
    html = page(db, "/runs/test/evaluations")
    first, last = (one.as_json() for one in db.query(evaluation_episodes.of_run, history.run_id))
    rows = [row for row in tables(html)[STEPS] if row[0]]
    assert [row[:4] for row in rows] == [["2", "2", "greedy", "all"], ["0", "0", "greedy", "all"]]
    for row, one in zip(rows, (last, first), strict=True):
        of = one["settings"]["greedy"]
        assert row[4] == f"{number(of['reward'])} [{number(of['low'])}, {number(of['high'])}]"
        assert row[6:] == ["3", "3", "0", "0"]
    assert html.count("<figure>") == 2  # the setting, and its source
    assert "/ui/runs/test/evaluations?version=2" in links(html)


@pytest.mark.long_on("postgresql")
def test_the_largest_loss_comes_first(db: Database) -> None:
    history = History(db, seed=1)
    before = evaluate(history, [1.0, 0.0, 0.5, 1.0])
    history.train(1)
    after = evaluate(history, [1.0, 1.0, 0.25, 0.0])
    html = page(db, "/runs/test/evaluations?version=1")
    rows = tables(html)[EPISODES]
    assert [(row[0], row[4]) for row in rows] == [("3", "-1"), ("2", "-0.2500"), ("0", "0"), ("1", "1")]
    assert rows[0][5:7] == ["1", "0"]
    assert [href for href in links(html) if "sessions" in href][:2] == [
        f"/ui/sessions/{before[3]}",
        f"/ui/sessions/{after[3]}",
    ]
    assert "greedy: mean gain -0.06250" in text(html)
    back = tables(page(db, "/runs/test/evaluations?version=0&against=1"))[EPISODES]
    assert next((row[0], row[4]) for row in back) == ("1", "-1")


@pytest.mark.long_on("postgresql")
def test_episodes_without_a_partner_come_last(db: Database) -> None:
    history = History(db, seed=1)
    evaluate(history, [1.0, 1.0])
    history.train(1)
    evaluate(history, [0.0, None, 1.0])
    rows = tables(page(db, "/runs/test/evaluations?version=1&against=0"))[EPISODES]
    assert [(row[0], row[4], row[5], row[6]) for row in rows] == [
        ("0", "-1", "1", "0"), ("1", "–", "1", "failed"), ("2", "–", "–", "1"),
    ]  # fmt: skip
    alone = tables(page(db, "/runs/test/evaluations?version=0"))[EPISODES]
    assert {row[4] for row in alone} == {"–"}


def test_a_repeated_episode_counts_with_its_first_completed_try(db: Database) -> None:
    history = History(db, seed=1)
    evaluate(history, [None])
    (kept,) = evaluate(history, [0.5])
    evaluate(history, [0.75])
    (row,) = db.query(evaluation_rows.of_version, history.run_id, 0)
    assert (row["session_id"], row["reward"]) == (kept, 0.5)
    assert [one.gain for one in evaluation_changes.of([row], [row])] == [0.0]


def test_what_others_wrote_is_text(db: Database) -> None:
    history = History(db, seed=1)
    evaluate(history, [1.0, 0.0], setting=HOSTILE[:40], source=HOSTILE)
    history.train(1)
    evaluate(history, [1.0, 1.0], setting=HOSTILE[:40], source=HOSTILE)
    with db.write() as conn:
        conn.execute(update(sessions).values(answer=HOSTILE))
    assert page(db, "/runs/test/evaluations?version=1").count("{{ 7777 * 7777 }}") > 4


def test_a_run_that_was_not_evaluated_says_how_to(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    assert "evaluation.tasks" in text(page(db, "/runs/test/evaluations"))
    history.evaluation()  # of an outside program, without a label
    assert "evaluation.tasks" in text(page(db, "/runs/test/evaluations"))


@pytest.mark.parametrize("query", ["version=7", "version=x", "version=0&against=7"])
def test_an_unknown_version_is_refused_by_name(db: Database, query: str) -> None:
    history = History(db, seed=1)
    evaluate(history, [1.0])
    found = visit(db, f"/runs/test/evaluations?{query}")
    assert found.status_code == 400
    assert query.split("&")[-1].split("=")[0] in found.text
