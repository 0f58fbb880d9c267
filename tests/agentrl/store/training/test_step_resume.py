"""Resuming at a step: after a crash before or after its checkpoint, and with a store ahead of it."""

from play import begin, finish, group, take
from sqlalchemy import text

from agentrl.store.training import step_resume


def test_a_crash_before_the_checkpoint_gives_the_lease_back(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    take(db, run_id, begin(db, run_id), 1)
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = step_resume.reconcile(conn, run_id, epoch, None)
    assert (plan.step, plan.roll_forward, plan.rolled_back_steps) == (0, False, [1])
    assert len(take(db, run_id, epoch, 1).trajectories) == 4


def test_a_crash_after_the_checkpoint_rolls_forward(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    batch = take(db, run_id, begin(db, run_id), 1)
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = step_resume.reconcile(conn, run_id, epoch, batch.step_id)
    assert (plan.step, plan.roll_forward, plan.version) == (1, True, 0)
    assert finish(db, run_id, epoch, batch) == 1


def test_a_store_ahead_of_the_checkpoint_rolls_back_and_never_reuses_a_version(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    epoch = begin(db, run_id)
    first = finish(db, run_id, epoch, take(db, run_id, epoch, 1))
    epoch = begin(db, run_id)
    with db.write() as conn:
        plan = step_resume.reconcile(conn, run_id, epoch, None)
    assert (plan.step, plan.version, plan.republish) == (0, 0, 0)
    assert finish(db, run_id, epoch, take(db, run_id, epoch, 1)) == first + 1
    with db.read() as conn:
        surviving = conn.execute(
            text("SELECT trajectory_id FROM lineage WHERE step_state != 'rolled_back' GROUP BY trajectory_id, step")
        ).all()
    assert len(surviving) == 4
