"""The training loop while a checkpoint is written. Resuming: test_resume.py."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from typing import Any

import pytest
from loop_setup import Died, Setup, same
from safetensors.torch import load_file

from agentrl.store.training import steps
from agentrl.trainer import training_run
from agentrl.trainer.checkpoints.checkpoint_writer import Writing
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.training_run import TrainingRun


@pytest.fixture
def n_steps() -> int:
    return 5


def checkpointed(setup: Setup) -> list[float]:
    """Whether each completed step is said to have a checkpoint."""
    with setup.database.read() as conn:
        return [s.metrics["checkpointed"] for s in steps.of_run(conn, setup.run_id) if s.metrics]


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """A checkpoint written in the background is ready only for a caller that waits for it."""
    asked: list[Future[Any]] = []

    def done(self: Writing) -> bool:
        asked.append(self.future)
        return False

    monkeypatch.setattr(Writing, "done", done)
    return asked


def test_training_continues_while_a_checkpoint_is_written(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = slow_disk(monkeypatch)
    known: list[list[float]] = []
    real = training_run.publish

    def publish(t: Trainer, version: int, tensors: Any) -> None:
        real(t, version, tensors)
        known.append(checkpointed(setup))

    monkeypatch.setattr(training_run, "publish", publish)
    assert setup.train(checkpoint_every=2)
    assert setup.proxy.published == [1, 2, 3, 4, 5]
    assert known == [[0], [0, 0], [0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1, 1]]  # the next one waits for the one before
    assert asked
    assert checkpointed(setup) == known[-1]


def test_a_trainer_killed_while_writing_a_checkpoint_resumes_from_the_one_before(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=5)
    with whole.proxy:
        assert whole.train()
    whole.database.close()
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == 5:
            writing = run._t.writing
            assert writing is not None
            shutil.rmtree(writing.finish().folder)  # a thread of a process that dies would not have completed it
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        slow_disk(patch)
        patch.setattr(TrainingRun, "update", update)
        with pytest.raises(Died):
            setup.train(checkpoint_every=2)
    assert checkpointed(setup) == [0, 1, 0, 0]
    assert setup.train(checkpoint_every=2)
    rolled_back = setup.query("SELECT step FROM steps WHERE state = 'rolled_back' ORDER BY step")
    assert [step for (step,) in rolled_back] == [3, 4, 5]
    assert not list((setup.config.run_dir / "checkpoints").glob(".*"))
    assert same(load_file(whole.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")
    assert (
        setup.query(
            "SELECT trajectory_id FROM step_trajectories JOIN steps ON steps.id = step_id "
            "WHERE state != 'rolled_back' GROUP BY 1 HAVING count(*) > 1"
        )
        == []
    )
