"""The folders of checkpoints: which are found, and which are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed_policy import CONFIG, FACTS, Run

from agentrl.errors import UserError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord


def test_an_unfinished_checkpoint_is_not_found(run: Run, tmp_path: Path) -> None:
    writing = run.begin(tmp_path, wait=False)
    assert writing.future is not None
    writing.future.result()
    assert checkpoint_folders.newest(tmp_path) == (None, [])
    assert writing.finish() == checkpoint_folders.newest(tmp_path)[0]


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, [4, 5]), ("reward_mean", [2, 4, 5]), ("-reward_mean", [1, 4, 5]), ("loss", [4, 5])]
)
def test_newest_and_best_checkpoints_are_kept(run: Run, tmp_path: Path, asked: str | None, kept: list[int]) -> None:
    for number, reward in enumerate([0.1, 0.9, 0.2, 0.9 - 1e-9, 0.3], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics={"reward_mean": reward, "loss": number})
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": asked}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == kept


def test_a_step_without_the_metric_is_never_the_best(run: Run, tmp_path: Path) -> None:
    for number, metrics in enumerate([{"reward/name/correct": 0.5}, {}, {"reward/name/correct": 0.4}, {}], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics=metrics)
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": "reward/name/correct"}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == [1, 3, 4]


def test_an_unknown_metric_deletes_nothing(run: Run, tmp_path: Path) -> None:
    record = StepRecord(step=1, version=1, batch=FACTS, metrics={"reward_mean": 1.0})
    made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
    with pytest.raises(UserError, match=r"keep_best: steps have no metric 'reward'; did you mean 'reward_mean'"):
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": "-reward"}))
