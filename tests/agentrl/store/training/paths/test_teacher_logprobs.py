"""What servers scored: kept once, read back bit for bit, removed with its trajectory."""

from __future__ import annotations

import time

import numpy as np
import pytest
from history import History

from agentrl.errors import FencedError
from agentrl.store import Database
from agentrl.store.training import steps, trainer_epochs
from agentrl.store.training.paths import teacher_logprobs
from agentrl.store.upkeep import retention


def test_the_first_numbers_stay(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    names = [t.trajectory_id for t in history.batches[1].trajectories]
    rng = np.random.default_rng(0)
    found = {name: rng.normal(-3, 1, 5 + i).astype(np.float32) for i, name in enumerate(names)}
    db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "http://a", found)
    again = {name: one + 1 for name, one in found.items()}
    db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "http://a", again)
    db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "http://b", {names[0]: again[names[0]]})
    db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "http://b", {})
    kept = db.query(teacher_logprobs.read, "http://a", [*names, "unknown"])
    assert kept.keys() == found.keys()
    assert all(kept[name].tobytes() == found[name].tobytes() for name in names)
    (only,) = db.query(teacher_logprobs.read, "http://b", names).values()
    assert only.tobytes() == again[names[0]].tobytes()


def test_an_older_trainer_keeps_nothing(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    name = history.batches[1].trajectories[0].trajectory_id
    db.transact(trainer_epochs.begin_epoch, history.run_id)
    with pytest.raises(FencedError):
        db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "t", {name: np.ones(2, np.float32)})
    assert db.query(teacher_logprobs.read, "t", [name]) == {}


def test_retention_removes_them_with_their_trajectories(db: Database) -> None:
    history = History(db, seed=1)
    gone = history.group()
    history.group()
    batch = history.lease()
    assert batch is not None
    names = {t.trajectory_id: t.group_id for t in batch.trajectories}
    scores = dict.fromkeys(names, np.ones(2, np.float32))
    db.transact(teacher_logprobs.keep, history.run_id, history.epoch, "t", scores)
    db.transact(steps.refuse, history.run_id, history.epoch, batch.step_id, {gone.group_id: "dull"})
    removed = retention.prune(db, history.run_id, time.time() + 1)
    left = {name for name, group_id in names.items() if group_id != gone.group_id}
    assert removed.rows["teacher_logprobs"] == len(names) - len(left) > 0
    assert db.query(teacher_logprobs.read, "t", list(names)).keys() == left
