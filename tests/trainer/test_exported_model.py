"""`agentrl export --checkpoint`: which checkpoint is chosen, and the folder that is written while a run trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Setup
from safetensors.torch import load_file
from sqlalchemy import text

from agentrl.configs.evaluation_config import EvalConfig
from agentrl.configs.trainer_config import AverageConfig
from agentrl.errors import StoreError, UserError
from agentrl.export import exported_model
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import META
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import TrainingRun
from agentrl.trainer.weights import streamed_model


@pytest.fixture
def n_steps() -> int:
    return 4


def choose(setup: Setup, which: str, **trainer: Any) -> int:
    """The step of the chosen checkpoint."""
    config = setup.config.model_copy(update={"trainer": setup.config.trainer.model_copy(update=trainer)})
    lineage = StoredLineage.of(setup.database, config)
    return exported_model.choose(config, lineage, which, config.run_dir).record.step


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_newest_or_best(setup: Setup) -> None:
    evaluation = EvalConfig(tasks="t:held_out", every=1)
    setup.config = setup.config.model_copy(update={"evaluation": evaluation})
    assert setup.train(keep_checkpoints=9)
    for step, reward in ((1, 0.1), (3, 0.9), (4, 0.5)):
        setup.evaluate(step, step, reward=reward)
    assert choose(setup, "2") == 2
    assert choose(setup, "latest") == 4
    assert choose(setup, "best", keep_best="evaluation/s/reward") == 3
    assert choose(setup, "best", keep_best="-evaluation/s/reward") == 1
    for which, said in (
        ("7", "has the checkpoints of steps 1, 2, 3, 4"),
        ("newest", "give a step, latest or best"),
        ("best", "run test has no trainer.keep_best; give a step or latest"),
    ):
        with pytest.raises(UserError, match=said):
            choose(setup, which)
    newest = checkpoint_folders.folders(setup.config.run_dir / "checkpoints")[-1]
    (newest / META).write_text("{}")
    assert choose(setup, "latest") == 3  # a damaged one is passed over
    shutil.rmtree(newest.parent)
    with pytest.raises(UserError, match="has no checkpoint of the run"):
        choose(setup, "latest")


def test_a_folder_is_written_while_the_run_trains(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, base = TrainingRun.update, Path(setup.model)
    expected: dict[int, dict[str, torch.Tensor]] = {}

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step > 1:
            lineage = StoredLineage.of(setup.database, setup.config)
            found = exported_model.choose(setup.config, lineage, "latest", setup.config.run_dir)
            written = exported_model.write(
                found, tmp_path / f"out-{found.record.step}", setup.config, base, verify=True
            )
            assert written.steps == (batch.step - 1,)
            assert written.bytes > 10_000
            trained = {name: p.detach().clone() for name, p in run._t.policy.trainable()}
            expected[written.steps[0]] = trained
        return real(run, batch)

    monkeypatch.setattr(TrainingRun, "update", update)
    assert setup.train()
    assert expected.keys() == {1, 2, 3}
    for step, tensors in expected.items():
        found = load_file(tmp_path / f"out-{step}" / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_is_in_the_way_is_named(setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert setup.train(checkpoint_every=4)
    lineage = StoredLineage.of(setup.database, setup.config)
    found = exported_model.choose(setup.config, lineage, "4", setup.config.run_dir)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(UserError, match=r"--to: .*full exists; give another folder, or --force"):
        exported_model.write(found, tmp_path / "full", setup.config, setup.model)
    exported_model.write(found, tmp_path / "full", setup.config, setup.model, force=True)
    assert not (tmp_path / "full" / "notes").exists()
    with pytest.raises(UserError, match=r"run test trains no adapter"):
        exported_model.write(found, tmp_path / "out", setup.config, setup.model, merged=False)
    write = streamed_model.write

    def deleted(*args: Any, **kwargs: Any) -> None:
        shutil.rmtree(found.folder)
        write(*args, **kwargs)

    monkeypatch.setattr(streamed_model, "write", deleted)
    with pytest.raises(StoreError, match=r"was deleted while it was read: the run keeps trainer\.keep_checkpoints"):
        exported_model.write(found, tmp_path / "out", setup.config, setup.model)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_command_needs_neither_a_trainer_nor_its_ranks(setup: Setup, tmp_path: Path) -> None:
    assert setup.train()
    url = f"sqlite:///{setup.config.runs_dir}/store.db"
    with setup.database.write() as conn:
        config = json.dumps(setup.config.model_dump(mode="json"))
        conn.execute(text("UPDATE runs SET config = :config"), {"config": config})
    command = [sys.executable, "-m", "agentrl", "export", "--run", "test", "--database-url", url]
    command += ["--checkpoint", "latest", "--to", str(tmp_path / "out"), "--model", str(setup.model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 4, ")
    model = load_file(setup.config.run_dir / "model" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], model[name]) for name in model)
    refused = subprocess.run([*command[:-4], "--out", "x"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--checkpoint needs --to FOLDER" in refused.stderr
    merge = [*command[:-6], "--merge", "3:1,4:3", "--to", str(tmp_path / "mean"), "--model", str(setup.model)]
    done = subprocess.run(merge, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("mean of steps 3, 4, ")
    refused = subprocess.run([*merge, "--adapter"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--merge goes without" in refused.stderr


def test_the_average_and_the_mean_of_checkpoints_are_written(setup: Setup, tmp_path: Path) -> None:
    average = AverageConfig(decay=0.5)
    assert setup.train(keep_checkpoints=9, average=average)
    trainer = setup.config.trainer.model_copy(update={"average": average})
    config = setup.config.model_copy(update={"trainer": trainer})
    lineage = StoredLineage.of(setup.database, config)
    found = {step: exported_model.choose(config, lineage, str(step), config.run_dir) for step in range(1, 5)}
    policy = {step: CheckpointTensors(one.folder, "policy") for step, one in found.items()}

    written = exported_model.write(found[3], tmp_path / "average", config, setup.model, average=True, verify=True)
    assert written.steps == (3,)
    files = load_file(tmp_path / "average" / "model.safetensors")
    for name in policy[3].names:
        one, two, three = (policy[step].read(name).double() for step in (1, 2, 3))
        expected = (0.25 * one + 0.5 * two + three) / 1.75
        torch.testing.assert_close(files[name].double(), expected, rtol=1e-5, atol=1e-7)
    assert json.loads((tmp_path / "average" / streamed_model.FACTS).read_text())["part"] == "average"

    weighted = [(found[2], 1.0), (found[4], 3.0)]
    written = exported_model.write_mean(weighted, tmp_path / "mean", config, setup.model, verify=True)
    assert written.steps == (2, 4)
    files = load_file(tmp_path / "mean" / "model.safetensors")
    for name in policy[2].names:
        expected = 0.25 * policy[2].read(name).double() + 0.75 * policy[4].read(name).double()
        torch.testing.assert_close(files[name].double(), expected, rtol=1e-5, atol=1e-7)
    facts = json.loads((tmp_path / "mean" / streamed_model.FACTS).read_text())
    assert [(one["step"], one["weight"]) for one in facts["mean_of"]] == [(2, 0.25), (4, 0.75)]

    with pytest.raises(UserError, match=r"--average: run test keeps none \(trainer.average is null\)"):
        exported_model.write(found[3], tmp_path / "none", setup.config, setup.model, average=True)
    with pytest.raises(UserError, match=r"--merge 7: .* has the checkpoints of steps 1, 2, 3, 4"):
        exported_model.choose(config, lineage, "7", config.run_dir, option="--merge")


def test_checkpoints_to_merge_are_named_with_weights() -> None:
    assert exported_model.weighted("1,latest") == [("1", 1.0), ("latest", 1.0)]
    assert exported_model.weighted("1:0.5, best:2") == [("1", 0.5), ("best", 2.0)]
    for given, said in (
        ("1", "give 2 to 64 checkpoints"),
        ("1,2:", "'2:' is no CHECKPOINT"),
        ("1,2:0", "with a weight above 0"),
        ("1,2:nan", "'2:nan' is no CHECKPOINT"),
        ("1,,2", "'' is no CHECKPOINT"),
        (",".join(["1"] * 65), "give 2 to 64 checkpoints"),
    ):
        with pytest.raises(UserError, match=said):
            exported_model.weighted(given)
