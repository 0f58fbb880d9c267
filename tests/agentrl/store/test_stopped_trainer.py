"""A trainer that is frozen with SIGSTOP, replaced, and continued: it can neither complete, lease nor publish."""

import os
import signal
import subprocess
import sys

import pytest
from play import finish, group, take
from sqlalchemy import text

from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.store.training import step_resume, trainer_epochs

OLD_TRAINER = """
import sys
from agentrl.errors import FencedError
from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.store import Database
from agentrl.store.training import step_resume, steps, trainer_epochs, version_states

url, run_id = sys.argv[1:]
db = Database(url)
epoch = db.transact(trainer_epochs.begin_epoch, run_id)
step_id = db.transact(steps.lease, run_id, epoch, step=1, n_groups=2, max_staleness=1, discount=1.0)
batch = db.query(steps.batch, step_id)
trained = [
    TrainedTrajectory(
        trajectory_id=t.trajectory_id, advantage=9.0, staleness_max=0, staleness_mean=0.0,
        tokens_trained=int(t.loss_mask.sum()),
    )
    for t in batch.trajectories
]
facts = TrainedBatch(step_id=step_id, digest=batch.digest(), estimator="grpo", wasted_tokens=0, trained=trained)
print("leased", flush=True)
sys.stdin.readline()  # stopped around here


def attempt(name, unit, *args, **kwargs):
    try:
        db.transact(unit, run_id, *args, **kwargs)
        print(name, "went through", flush=True)
    except FencedError:
        print(name, "fenced", flush=True)


attempt("complete", steps.complete, epoch, facts, metrics={}, version=7, path="old", checksum="old")
attempt("lease", steps.lease, epoch, step=2, n_groups=2, max_staleness=1, discount=1.0)
attempt("publish", version_states.mark_published, 1, epoch)
attempt("reconcile", step_resume.reconcile, epoch, None)
"""


@pytest.mark.long_on("sqlite")
def test_a_trainer_that_was_stopped_and_replaced_changes_nothing(db, run_id, limits):
    for _ in range(4):
        group(db, run_id, limits)
    old = subprocess.Popen(
        [sys.executable, "-c", OLD_TRAINER, db.url, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert old.stdout.readline() == "leased\n"
        os.kill(old.pid, signal.SIGSTOP)

        epoch = db.transact(trainer_epochs.begin_epoch, run_id)
        plan = db.transact(step_resume.reconcile, run_id, epoch, None)
        assert (plan.step, plan.rolled_back_steps) == (0, [1])
        for step in (1, 2):
            finish(db, run_id, epoch, take(db, run_id, epoch, step))
        before = db.query(_everything, run_id)

        os.kill(old.pid, signal.SIGCONT)
        answers, _ = old.communicate("go on\n", timeout=120)
    finally:
        old.kill()
    assert answers.splitlines() == ["complete fenced", "lease fenced", "publish fenced", "reconcile fenced"]
    assert db.query(_everything, run_id) == before
    assert db.query(lambda conn: list(run_audit.scan(conn, run_id))) == []


def _everything(conn, run_id):
    """What a trainer can change."""
    tables = ("steps", "trajectories", "groups", "weight_versions", "step_trajectories")
    return [runs.get(conn, run_id)] + [
        sorted(conn.execute(text(f"SELECT * FROM {table}")).all(), key=str) for table in tables
    ]
