"""The digests of checkpoints in the store: fenced, one for a step, the newest of the surviving lineage."""

from __future__ import annotations

import pytest
from history import History

from agentrl.errors import FencedError
from agentrl.store import Database, run_view
from agentrl.store.training import checkpoint_rows, step_resume, steps, trainer_epochs


def record(history: History, step: int, digest: str) -> str:
    """Record a checkpoint of a step; returns the step's id."""
    step_id = str(history.db.query(steps.of_run, history.run_id, step - 1)[0].id)
    history.db.transact(
        checkpoint_rows.record, history.run_id, history.epoch, step_id, digest=digest, size_bytes=7 << 40
    )
    return step_id


def test_the_newest_of_the_surviving_lineage_is_shown(db: Database) -> None:
    history = History(db, seed=1)
    assert db.query(checkpoint_rows.newest, history.run_id) is None
    history.train(2)
    first = record(history, 1, "a" * 64)
    second = record(history, 2, "b" * 64)
    db.transact(checkpoint_rows.set_stored, history.run_id, history.epoch, [first])
    found = db.query(checkpoint_rows.newest, history.run_id)
    assert found is not None
    assert (found["step"], found["digest"], found["size_bytes"], found["stored_at"]) == (2, "b" * 64, 7 << 40, None)
    assert [row["checkpoint"] for row in db.query(run_view.of_steps, history.run_id, 0)] == ["a" * 64, "b" * 64]
    epoch = db.transact(trainer_epochs.begin_epoch, history.run_id)
    db.transact(step_resume.reconcile, history.run_id, epoch, first)
    found = db.query(checkpoint_rows.newest, history.run_id)
    assert found is not None
    assert (found["step"], found["stored_at"] is None) == (1, False)
    assert db.query(checkpoint_rows.digest_of, second) == "b" * 64  # what was written stays known


def test_a_checkpoint_that_is_written_again_replaces_the_older_one(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    step_id = record(history, 1, "a" * 64)
    db.transact(checkpoint_rows.set_stored, history.run_id, history.epoch, [step_id])
    record(history, 1, "a" * 64)  # changes nothing
    found = db.query(checkpoint_rows.newest, history.run_id)
    assert found is not None
    assert found["stored_at"] is not None
    record(history, 1, "c" * 64)
    found = db.query(checkpoint_rows.newest, history.run_id)
    assert found is not None
    assert (found["digest"], found["stored_at"]) == ("c" * 64, None)


def test_an_overtaken_trainer_records_nothing(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    db.transact(trainer_epochs.begin_epoch, history.run_id)
    with pytest.raises(FencedError):
        record(history, 1, "a" * 64)
    with pytest.raises(FencedError):
        db.transact(checkpoint_rows.set_stored, history.run_id, history.epoch, [])
