"""Evaluations that are kept by a process are those that the store would give."""

from __future__ import annotations

import pytest
from history import History

from agentrl.domain.evaluation import Episode, Label
from agentrl.store import Database, evaluation_episodes
from agentrl.store.training import trainer_epochs
from agentrl.store.views import evaluation_results

EPISODES = 3


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=3)
    made.train(3)
    return made


def evaluate(history: History, version: int, episodes: int = EPISODES) -> None:
    for index in range(episodes):
        label = Label(step=version, version=version, episode=Episode("sampled", index, 0), episodes=EPISODES)
        history.evaluation(label.metadata, versions=[version])


def stored(history: History) -> list[object]:
    return [one.as_json() for one in history.db.query(evaluation_episodes.of_run, history.run_id)]


def test_they_are_those_of_the_store(history: History) -> None:
    kept = None
    for version, complete in ((0, 1), (1, 2), (2, 2)):
        evaluate(history, version, EPISODES if version < 2 else 1)
        found, kept = history.db.query(evaluation_results.read, history.run_id, kept)
        assert found == stored(history)
        assert len(kept.results) == complete
    found, kept = history.db.query(evaluation_results.read, history.run_id, kept)
    assert found == stored(history)


def test_a_trainer_that_starts_again_makes_them_be_read_again(history: History) -> None:
    evaluate(history, 3)
    found, kept = history.db.query(evaluation_results.read, history.run_id)
    assert [one["version"] for one in found] == [3]
    history.go_back(1)
    with history.db.write() as conn:
        trainer_epochs.begin_epoch(conn, history.run_id)
    found, _ = history.db.query(evaluation_results.read, history.run_id, kept)
    assert found == stored(history) == []


def test_a_run_without_evaluations_has_none(history: History) -> None:
    found, kept = history.db.query(evaluation_results.read, history.run_id)
    assert (found, kept.results) == ([], ())
