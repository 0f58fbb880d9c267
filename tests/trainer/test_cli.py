"""`agentrl trainer` as a process: one rank and two, SIGTERM, fencing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commanded import Run
from poison import poison_store
from proxy_stub import play_groups
from safetensors.torch import load_file
from sqlalchemy import text

from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.store import events, runs
from agentrl.store.training import steps, trainer_epochs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    r = Run(tmp_path)
    with r.proxy:
        yield r
    r.database.close()


def test_two_ranks_train_a_run_to_its_end(run: Run) -> None:
    play_groups(run.database, run.run_id, 2)
    run.proxy.refuse = 2
    process = run.start("resources.trainer.ranks=2")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "step 2/2" in out
    assert "publishing version 1: the proxy answered 503" in out
    with run.database.read() as conn:
        assert [s.state for s in steps.of_run(conn, run.run_id)] == ["published", "published"]
        assert runs.get(conn, run.run_id).status == "finished"
    assert load_file(run.folder / "model" / "model.safetensors")


def test_sigterm_while_waiting_exits_cleanly_and_a_restart_continues(run: Run) -> None:
    play_groups(run.database, run.run_id, 1)
    process = run.start()
    for line in process.stdout:
        if line.startswith("step 1/2"):
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    play_groups(run.database, run.run_id, 1, seed=1, version=1)
    process = run.start()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "resuming after step 1, version 1" in out
    with run.database.read() as conn:
        counts = conn.execute(text("SELECT count(*), count(DISTINCT trajectory_id) FROM step_trajectories")).one()
    assert tuple(counts) == (6, 6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lost_checkpoints_are_a_user_error_and_do_not_fence_another_trainer(run: Run, ranks: int) -> None:
    play_groups(run.database, run.run_id, 1)
    with run.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, run.run_id)
        step_id = steps.lease(conn, run.run_id, epoch, step=1, n_groups=1, max_staleness=1, discount=1.0)
        batch = steps.batch(conn, step_id)
        ids = [t.trajectory_id for t in batch.trajectories]
        steps.complete(
            conn,
            run.run_id,
            epoch,
            TrainedBatch(
                step_id=step_id,
                digest=batch.digest(),
                estimator="grpo",
                wasted_tokens=0,
                trained=[
                    TrainedTrajectory(
                        trajectory_id=i, advantage=0.0, staleness_max=0, staleness_mean=0.0, tokens_trained=8
                    )
                    for i in ids
                ],
            ),
            metrics={"checkpointed": 1.0},
            version=1,
            path="gone",
            checksum="c",
        )
    process = run.start(f"resources.trainer.ranks={ranks}")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("agentrl: run 'test' is trained up to step 1, but ")
    assert f"{run.folder / 'checkpoints'} does not exist" in err
    with run.database.read() as conn:
        assert [s.state for s in steps.of_run(conn, run.run_id)] == ["trained"]
        assert runs.get(conn, run.run_id).trainer_epoch == epoch


def test_an_overtaken_trainer_exits_with_status_3(run: Run) -> None:
    process = run.start()
    while True:  # until it has begun its epoch; the process ends by itself if it cannot
        with run.database.read() as conn:
            if runs.get(conn, run.run_id).trainer_epoch == 1:
                break
        assert process.poll() is None, process.communicate()
    with run.database.write() as conn:
        trainer_epochs.begin_epoch(conn, run.run_id)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "epoch 1 is over: epoch 2 has started" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_stopping_at_a_nonfinite_loss_prints_the_error_last_with_any_number_of_ranks(run: Run, ranks: int) -> None:
    play_groups(run.database, run.run_id, 2)
    with run.database.read() as conn:
        trajectory_id = conn.execute(text("SELECT min(id) FROM trajectories")).scalar_one()
    poison_store(run.database, trajectory_id)
    process = run.start(f"resources.trainer.ranks={ranks}")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("agentrl: step 1: not finite in minibatch 1 of 1: infinite_logprobs 1, loss nan")
    assert trajectory_id in last
    with run.database.read() as conn:
        assert [s.state for s in steps.of_run(conn, run.run_id)] == ["started"]
        (event,) = events.of_run(conn, run.run_id, "nonfinite")
    assert event.data["trajectories"] == [trajectory_id]
