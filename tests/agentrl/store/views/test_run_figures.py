"""The figures of a run are sums over the surviving steps."""

from __future__ import annotations

import pytest
from history import History

from agentrl.store import Database
from agentrl.store.views import run_figures


def test_totals_are_of_surviving_steps(db: Database) -> None:
    history = History(db, seed=1)
    assert db.query(run_figures.of_run, history.run_id)["reward"] is None
    history.train(2)
    two = db.query(run_figures.of_run, history.run_id)
    history.train(1)
    three = db.query(run_figures.of_run, history.run_id)
    assert (two["steps"], three["steps"]) == (2, 3)
    assert three["tokens_trained"] > two["tokens_trained"] > 0
    assert three["reward"] is not None
    history.go_back(2)
    back = db.query(run_figures.of_run, history.run_id)
    assert {name: back[name] for name in ("steps", "tokens_trained", "trajectories")} == {
        name: two[name] for name in ("steps", "tokens_trained", "trajectories")
    }
    assert back["reward"] == pytest.approx(two["reward"])


def test_a_run_without_evaluations_has_no_held_out_reward(db: Database) -> None:
    history = History(db)
    history.evaluation()  # of an outside program: it belongs to no step
    found = db.query(run_figures.of_run, history.run_id)
    assert (found["held_out"], found["held_out_step"]) == (None, None)
