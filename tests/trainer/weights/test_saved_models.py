"""Folders of the model that a run writes every N steps, beside the steps."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Died, Setup
from safetensors.torch import load_file

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import Checkpoint
from agentrl.trainer.training_run import TrainingRun
from agentrl.trainer.weights import streamed_model
from agentrl.trainer.weights.saved_models import SavedModels
from agentrl.trainer.weights.streamed_model import FACTS


@pytest.fixture
def n_steps() -> int:
    return 5


def saved(setup: Setup) -> list[str]:
    return sorted(path.name for path in (setup.config.run_dir / "models").iterdir())


def kept(setup: Setup) -> list[int]:
    return [int(folder.name[5:11]) for folder in checkpoint_folders.folders(setup.config.run_dir / "checkpoints")]


@pytest.mark.parametrize(
    "every", [1, pytest.param(50, marks=pytest.mark.long), pytest.param("auto", marks=pytest.mark.long)]
)
def test_every_second_step_leaves_a_folder_of_its_model(setup: Setup, every: Any) -> None:
    assert setup.train(checkpoint_every=every, save_every=2)
    assert saved(setup) == ["step-000002", "step-000004"]
    versions = {int(path.name[1]): path for path in (setup.config.run_dir / "weights").iterdir()}
    model = load_file(setup.config.run_dir / "models" / "step-000004" / "model.safetensors")
    published = load_file(versions[4] / "model.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in published.items())
    assert kept(setup)[-1] == 5
    assert len(kept(setup)) == 2


def test_the_newest_folders_are_kept(setup: Setup) -> None:
    other = setup.config.run_dir / "models" / "step-000000"
    other.mkdir(parents=True)
    assert setup.train(save_every=1, keep_models=2)
    assert saved(setup) == ["step-000000", "step-000004", "step-000005"]  # the first is not the trainer's


def test_a_checkpoint_stays_until_its_model_is_written(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), streamed_model.write

    def slow(folder: Path, *args: Any, **kwargs: Any) -> None:
        if folder.name == "step-000002":
            assert go_on.wait(60)
        write(folder, *args, **kwargs)

    monkeypatch.setattr(streamed_model, "write", slow)
    real, seen = TrainingRun.save, []

    def save(run: TrainingRun) -> None:
        real(run)
        seen.append(kept(setup))
        if run._updated is None and len(seen) == 4:
            go_on.set()

    monkeypatch.setattr(TrainingRun, "save", save)
    with monkeypatch.context() as patch:
        patch.setattr(SavedModels, "offer", lambda self, found: found.record.step == 2 and _offer(self, found))
        assert setup.train(save_every=2)
    assert seen[:4] == [[1], [1, 2], [2, 3], [2, 3, 4]]
    assert kept(setup) == [4, 5]
    assert saved(setup) == ["step-000002"]


_offer = SavedModels.offer


def test_a_trainer_that_was_killed_writes_the_folder_after_its_resume(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == 3:
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", update)
        patch.setattr(SavedModels, "_write", lambda *_: None)
        with pytest.raises(Died):
            setup.train(save_every=2)
    draft = setup.config.run_dir / "models" / ".step-000002.0123.part"
    draft.mkdir(parents=True)
    assert setup.train(save_every=2)
    assert saved(setup) == ["step-000002", "step-000004"]


def test_a_folder_of_a_step_that_was_rolled_back_is_replaced(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == 3:
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", update)
        with pytest.raises(Died):
            setup.train(save_every=2)
    folder = setup.config.run_dir / "models" / "step-000002"
    before = json.loads((folder / FACTS).read_text())
    shutil.rmtree(next((setup.config.run_dir / "checkpoints").glob("step-000002-*")))
    assert setup.train(save_every=2)
    after = json.loads((folder / FACTS).read_text())
    assert (before["version"], after["version"]) == (2, 3)
    assert before["step_id"] != after["step_id"]


def test_a_model_that_cannot_be_written_ends_the_trainer(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, found: Checkpoint, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streamed_model, "write", full)
    with pytest.raises(StoreError, match=r"model .*models/step-000002 cannot be written: .*No space left"):
        setup.train(save_every=2)
    monkeypatch.undo()
    assert setup.train(save_every=2)
    assert saved(setup) == ["step-000002", "step-000004"]
