"""Steps, from admission and leases to their completion, driven as the proxy and the trainer drive them."""

import numpy as np
import pytest
from play import begin, call, finish, group, take

from agentrl.domain.schemas import SessionStatus, TrainedBatch
from agentrl.errors import RequestError, StoreError
from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.store.db import id_lists
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards, steps


def test_a_batch_carries_the_exact_tokens_and_masks(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    assert len(batch.trajectories) == 4
    one = batch.trajectories[1]
    assert one.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert one.loss_mask.tolist() == [False, False, True, True, False, True, True, True]
    assert one.turn_ids.tolist() == [-1, -1, 0, 0, -1, 1, 1, 1]
    assert one.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5, -0.5, -0.5]
    assert one.turn_returns.tolist() == [1.0, 1.0]
    assert one.episode_return == 1.0


def test_lease_waits_for_whole_groups(db, run_id, limits):
    group(db, run_id, limits)
    assert take(db, run_id, begin(db, run_id), 1) is None


def test_admission_is_bounded_by_staleness_and_resumes_after_a_publish(db, run_id, limits):
    for _ in range(4):  # (η + 0 + 1)·B
        group(db, run_id, limits)
    with pytest.raises(RequestError) as refused:
        group(db, run_id, limits)
    assert (refused.value.status, refused.value.code) == (429, "no_capacity")
    epoch = begin(db, run_id)
    finish(db, run_id, epoch, take(db, run_id, epoch, 1))
    group(db, run_id, limits, version=1)


def test_a_group_with_too_few_good_sessions_gives_its_place_back(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["a", "b"])
        for session_id in new.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "boom", limits)
        run = runs.get(conn, run_id)
    assert (run.admitted, run.returned, run.running) == (1, 1, 0)


@pytest.mark.long_on("postgresql")
def test_a_refusal_whose_answer_was_lost_may_be_repeated(db, run_id, limits):
    new = group(db, run_id, limits)
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 1, n_groups=1)
    for _ in range(2):
        with db.write() as conn:
            steps.refuse(conn, run_id, epoch, batch.step_id, {new.group_id: "too easy"})
    with db.write() as conn, pytest.raises(StoreError, match="it is not leased"):
        steps.refuse(conn, run_id, epoch, batch.step_id, {new.group_id: "another reason"})
    assert db.query(runs.get, run_id).returned == 1


@pytest.mark.long_on("postgresql")
def test_a_step_may_have_more_rows_than_a_statement_has_parameters(db, run_id, limits, monkeypatch):
    monkeypatch.setattr(id_lists, "MOST_IDS", 1)
    for _ in range(2):
        group(db, run_id, limits)
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 1, n_groups=2)
    assert len({t.trajectory_id for t in batch.trajectories}) == 4
    finish(db, run_id, epoch, batch)
    assert db.query(lambda conn: list(run_audit.scan(conn, run_id))) == []


def test_too_old_groups_become_stale_and_give_their_place_back(db, run_id, limits):
    epoch = begin(db, run_id)
    for step in (1, 2):
        group(db, run_id, limits, version=step - 1)
        group(db, run_id, limits, version=step - 1)
        finish(db, run_id, epoch, take(db, run_id, epoch, step))
    group(db, run_id, limits, version=0)  # two versions old at step 3
    assert take(db, run_id, epoch, 3) is None
    with db.read() as conn:
        assert runs.get(conn, run_id).returned == 1
        assert runs.state_counts(conn, run_id)["trajectories"] == {"trained": 8, "stale": 2}


@pytest.mark.long_on("postgresql")
def test_completing_with_other_trajectories_is_refused(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 1)
    facts = TrainedBatch(step_id=batch.step_id, digest="", estimator="grpo", wasted_tokens=0, trained=[])
    with pytest.raises(StoreError, match="other trajectories"), db.write() as conn:
        steps.complete(conn, run_id, epoch, facts, metrics={}, version=1, path="p", checksum="c")


def test_shared_outputs_belong_to_one_trajectory(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["a", "b"])
        for session_id in new.session_ids:
            root = call(conn, run_id, session_id)
            call(conn, run_id, session_id, parent=root, delta=(5,), output=(6,))
            call(conn, run_id, session_id, parent=root, delta=(5,), output=(7,))
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    forked = [t for t in batch.trajectories if t.group_id == new.group_id]
    assert sorted(t.input_ids.tolist()[-1] for t in forked) == [6, 6, 7, 7]
    assert sum(int(np.sum(t.loss_mask)) for t in forked) == 2 * (2 + 1 + 1)
