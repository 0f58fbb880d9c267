"""Admission, leases and resume, driven as the proxy and the trainer drive them."""

import time

import numpy as np
import pytest
from sqlalchemy import text

from agentrl.errors import FencedError, RequestError, StoreError
from agentrl.schemas import InteractionStatus, SessionStatus, TrainedBatch, TrainedTrajectory, VersionSpan
from agentrl.store import Database, codec, interactions, rewards, runs, sessions, steps


def call(conn, run_id, session_id, *, parent=None, delta=(1, 2), output=(3, 4), version=0, key=b"k"):
    """One recorded call."""
    call_id = codec.new_id()
    interactions.begin(
        conn,
        interactions.Intent(
            id=call_id, run_id=run_id, session_id=session_id, parent_id=parent, dialect="openai.chat", role="main",
            digest="d", replica="r", params={}, temperature=1.0, tools=None, fork_reason=None, bridged=bool(parent),
            distribution_modified=False, trainable=True, prompt_ids=list(delta), created_at=time.time(),
        ),
    )  # fmt: skip
    interactions.finish(
        conn, call_id, session_id,
        interactions.Outcome(
            status=InteractionStatus.COMPLETE, conversation_key=key, new_messages=[], answer={},
            prompt_delta_ids=list(delta), output_ids=list(output), logprobs=[-0.5] * len(output),
            spans=[VersionSpan(version=version, start=0, end=len(output))], finish_reason="stop", engine_url="e",
            cached_tokens=0, first_token_at=None,
        ),
    )  # fmt: skip
    return call_id


def group(db: Database, run_id, limits, *, version=0, values=(0.0, 1.0)):
    """A whole rewarded group of two sessions."""
    with db.write() as conn:
        new = sessions.start_group(conn, run_id, limits, [codec.new_id() for _ in values])
        for session_id, value in zip(new.session_ids, values, strict=True):
            first = call(conn, run_id, session_id, version=version)
            call(conn, run_id, session_id, parent=first, delta=(5,), output=(6, 7, 8), version=version)
            rewards.add(conn, session_id, value=value, discount=1.0)
            sessions.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    return new


def take(db, run_id, epoch, step, **kwargs):
    with db.write() as conn:
        step_id = steps.lease(conn, run_id, epoch, step=step, n_groups=2, max_staleness=1, discount=1.0, **kwargs)
        return None if step_id is None else steps.batch(conn, step_id)


def finish(db, run_id, epoch, batch, *, publish=True):
    trained = [
        TrainedTrajectory(
            trajectory_id=t.trajectory_id, advantage=1.0, staleness_max=0, staleness_mean=0.0, tokens_trained=5
        )
        for t in batch.trajectories
    ]
    with db.write() as conn:
        version = steps.next_version(conn, run_id)
        facts = TrainedBatch(
            step_id=batch.step_id, digest=batch.digest(), estimator="grpo", wasted_tokens=0, trained=trained
        )
        steps.complete(conn, run_id, epoch, facts, metrics={"loss": 0.1}, version=version, path="p", checksum="c")
        if publish:
            steps.mark_published(conn, run_id, version)
    return version


def begin(db, run_id):
    with db.write() as conn:
        return steps.begin_epoch(conn, run_id)


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
        new = sessions.start_group(conn, run_id, limits, ["a", "b"])
        for session_id in new.session_ids:
            sessions.end(conn, session_id, SessionStatus.FAILED, "boom", limits)
        run = runs.get(conn, run_id)
    assert (run.admitted, run.returned, run.running) == (1, 1, 0)


def test_an_old_trainer_is_fenced_everywhere(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    old = begin(db, run_id)
    batch = take(db, run_id, old, 1)
    begin(db, run_id)
    with pytest.raises(FencedError):
        take(db, run_id, old, 1)
    with pytest.raises(FencedError):
        finish(db, run_id, old, batch)


def test_a_crash_before_the_checkpoint_gives_the_lease_back(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    take(db, run_id, begin(db, run_id), 1)
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = steps.reconcile(conn, run_id, epoch, None)
    assert (plan.step, plan.roll_forward, plan.rolled_back_steps) == (0, False, [1])
    assert len(take(db, run_id, epoch, 1).trajectories) == 4


def test_a_crash_after_the_checkpoint_rolls_forward(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = steps.reconcile(conn, run_id, epoch, batch.step_id)
    assert (plan.step, plan.roll_forward, plan.version) == (1, True, 0)
    assert finish(db, run_id, epoch, batch) == 1


def test_a_store_ahead_of_the_checkpoint_rolls_back_and_never_reuses_a_version(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    epoch = begin(db, run_id)
    first = finish(db, run_id, epoch, take(db, run_id, epoch, 1))
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = steps.reconcile(conn, run_id, epoch, None)
    assert (plan.step, plan.version, plan.republish) == (0, 0, 0)
    assert finish(db, run_id, epoch, take(db, run_id, epoch, 1)) == first + 1
    with db.read() as conn:
        surviving = conn.execute(
            text("SELECT trajectory_id FROM lineage WHERE step_state != 'rolled_back' GROUP BY trajectory_id, step")
        ).all()
    assert len(surviving) == 4


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
        new = sessions.start_group(conn, run_id, limits, ["a", "b"])
        for session_id in new.session_ids:
            root = call(conn, run_id, session_id)
            call(conn, run_id, session_id, parent=root, delta=(5,), output=(6,))
            call(conn, run_id, session_id, parent=root, delta=(5,), output=(7,))
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sessions.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    forked = [t for t in batch.trajectories if t.group_id == new.group_id]
    assert sorted(t.input_ids.tolist()[-1] for t in forked) == [6, 6, 7, 7]
    assert sum(int(np.sum(t.loss_mask)) for t in forked) == 2 * (2 + 1 + 1)
