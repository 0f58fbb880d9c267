"""Facts of tokens in the store: replaced as a whole, fenced, of one step, and pruned with their steps."""

from __future__ import annotations

import time

import numpy as np
import pytest
from history import History, made_up_facts
from sqlalchemy import update

from agentrl.domain.schemas import FACTS, MASKED_FACTS, TokenFacts
from agentrl.errors import FencedError
from agentrl.store import Database, tables
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.exports import token_rows
from agentrl.store.training import steps, token_facts, trainer_epochs
from agentrl.store.upkeep import retention


def some(history: History, step: int) -> tuple[str, dict[str, TokenFacts]]:
    """A step's id, and made-up facts of its batch."""
    step_id = history.db.query(steps.of_run, history.run_id, step - 1)[0].id
    return step_id, made_up_facts(history.batches[step], step)


def keep(history: History, step_id: str, facts: dict[str, TokenFacts]) -> None:
    history.db.transact(token_facts.record, history.run_id, history.epoch, step_id, facts)


def test_facts_are_read_as_they_were_kept_and_replaced_as_a_whole(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    step_id, facts = some(history, 1)
    keep(history, step_id, {name: TokenFacts(0 * one.trained, 0 * one.masked) for name, one in facts.items()})
    one, *_ = facts
    keep(history, step_id, {one: facts[one]})
    found = db.query(token_facts.of_trajectories, dict.fromkeys(facts, step_id))
    assert found.keys() == {one}
    np.testing.assert_array_equal(found[one].trained, facts[one].trained)
    np.testing.assert_array_equal(found[one].masked, facts[one].masked)
    assert db.query(token_facts.of_trajectories, {one: "another step"}) == {}


def test_facts_of_an_older_trainer_are_read_without_those_it_did_not_know(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    step_id, facts = some(history, 1)
    keep(history, step_id, facts)
    with db.write() as conn:
        for name, one in facts.items():
            row = tables.token_facts.c.trajectory_id == name
            older = {"facts": 9, "data": codec.pack_tables(one.trained[:9], one.masked)}
            conn.execute(update(tables.token_facts).where(row).values(older))
    for name, found in db.query(token_facts.of_trajectories, dict.fromkeys(facts, step_id)).items():
        np.testing.assert_array_equal(found.trained[:9], facts[name].trained[:9])
        assert np.isnan(found.trained[9:]).all()
        assert len(found.trained) == len(FACTS) > 9
        np.testing.assert_array_equal(found.masked, facts[name].masked)


def test_an_overtaken_trainer_keeps_nothing(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    db.transact(trainer_epochs.begin_epoch, history.run_id)
    with pytest.raises(FencedError):
        keep(history, *some(history, 1))


@pytest.mark.long_on("postgresql")
def test_the_facts_of_a_token_are_at_its_place(db: Database) -> None:
    history = History(db, seed=3)
    history.train(1)
    step_id, facts = some(history, 1)
    keep(history, step_id, facts)
    assert any(t.masked_outputs.any() for t in history.batches[1].trajectories)
    for t in history.batches[1].trajectories:
        row = db.query(token_rows.of_trajectory, history.run_id, t.trajectory_id)
        kept = facts[t.trajectory_id]
        for i, name in enumerate(FACTS):
            np.testing.assert_array_equal(row[name][t.loss_mask], kept.trained[i])
        for i, name in enumerate(MASKED_FACTS):
            np.testing.assert_array_equal(row[name][t.masked_outputs], kept.masked[i])
        for name in FACTS:
            measured = t.loss_mask | t.masked_outputs if name in MASKED_FACTS else t.loss_mask
            assert np.isnan(row[name][~measured]).all()


@pytest.mark.long_on("postgresql")
def test_rows_without_masked_outputs_are_read(db: Database) -> None:
    """Rows of older versions have the table of loss tokens alone."""
    history = History(db, seed=3)
    history.train(1)
    step_id, facts = some(history, 1)
    keep(history, step_id, facts)
    with db.write() as conn:
        for name, one in facts.items():
            data = codec.pack_tables(one.trained)
            conn.execute(update(tables.token_facts).where(tables.token_facts.c.trajectory_id == name).values(data=data))
    for t in history.batches[1].trajectories:
        row = db.query(token_rows.of_trajectory, history.run_id, t.trajectory_id)
        np.testing.assert_array_equal(row["entropy"][t.loss_mask], facts[t.trajectory_id].trained[2])
        assert np.isnan(row["entropy"][~t.loss_mask]).all()


def test_pruning_removes_the_facts_of_old_steps_only(db: Database) -> None:
    history = History(db, seed=1)
    history.train(2)
    for step in (1, 2):
        keep(history, *some(history, step))
    cut = db.query(retention.cut_before_steps, history.run_id, 1)
    expected = retention.estimate(db, history.run_id, cut)
    removed = retention.prune(db, history.run_id, cut)
    assert removed.rows["token_facts"] == expected.rows["token_facts"] == len(history.batches[1].trajectories)
    assert removed.bytes >= 4 * removed.rows["token_facts"]
    names = [t.trajectory_id for batch in history.batches.values() for t in batch.trajectories]
    for step, left in ((1, 0), (2, len(history.batches[2].trajectories))):
        step_id, _ = some(history, step)
        assert len(db.query(token_facts.of_trajectories, dict.fromkeys(names, step_id))) == left
    assert db.query(lambda conn: list(run_audit.scan(conn, history.run_id))) == []


def test_a_group_with_facts_of_a_step_that_was_rolled_back_can_be_pruned(db: Database) -> None:
    history = History(db, seed=1)
    new = history.group()
    history.group()
    batch = history.lease()
    assert batch is not None
    keep(history, batch.step_id, made_up_facts(batch))
    history.go_back(0)
    again = history.lease()
    assert again is not None
    db.transact(steps.refuse, history.run_id, history.epoch, again.step_id, {new.group_id: "dull"})
    removed = retention.prune(db, history.run_id, time.time() + 1)
    assert removed.rows["groups"] == 1
    assert removed.rows["token_facts"] == len(batch.trajectories)
