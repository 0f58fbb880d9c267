"""Which checkpoints are kept, and which is the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpointed_policy import CONFIG, FACTS, Run

from agentrl.errors import UserError
from agentrl.trainer.checkpoints import checkpoint_retention, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, [4, 5]), ("reward_mean", [2, 4, 5]), ("-reward_mean", [1, 4, 5]), ("loss", [4, 5])]
)
def test_newest_and_best_checkpoints_are_kept(run: Run, tmp_path: Path, asked: str | None, kept: list[int]) -> None:
    for number, reward in enumerate([0.1, 0.9, 0.2, 0.9 - 1e-9, 0.3], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics={"reward_mean": reward, "loss": number})
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, copied=False).finish()
        checkpoint_retention.remove_older(made, CONFIG.model_copy(update={"keep_best": asked}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == kept


def test_a_step_without_the_metric_is_never_the_best(run: Run, tmp_path: Path) -> None:
    for number, metrics in enumerate([{"reward/name/correct": 0.5}, {}, {"reward/name/correct": 0.4}, {}], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics=metrics)
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, copied=False).finish()
        checkpoint_retention.remove_older(made, CONFIG.model_copy(update={"keep_best": "reward/name/correct"}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == [1, 3, 4]


def test_an_unknown_metric_deletes_nothing(run: Run, tmp_path: Path) -> None:
    record = StepRecord(step=1, version=1, batch=FACTS, metrics={"reward_mean": 1.0})
    made = checkpoint_writer.begin(tmp_path, record, {}, run.world, copied=False).finish()
    with pytest.raises(UserError, match=r"keep_best: steps have no metric 'reward'; did you mean 'reward_mean'"):
        checkpoint_retention.remove_older(made, CONFIG.model_copy(update={"keep_best": "-reward"}))


def evaluated(run: Run, root: Path, results: Mapping[int, float | None], asked: str, held: frozenset[str]) -> list[int]:
    """The steps that are kept of five; a step without a result was not evaluated, None: its evaluation goes on."""

    def scores(found: Checkpoint) -> dict[str, float] | None:
        result = results.get(found.record.step, 0.0)
        if found.record.step not in results:
            return {}
        return None if result is None else {"evaluation/default/reward": result}

    for number in range(1, 6):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics={})
        made = checkpoint_writer.begin(root, record, {}, run.world, copied=False).finish()
    checkpoint_retention.remove_older(made, CONFIG.model_copy(update={"keep_best": asked}), scores, held)
    return [int(folder.name[5:11]) for folder in sorted(root.iterdir())]


@pytest.mark.parametrize(
    ("results", "asked", "kept"),
    [
        ({1: 0.9, 2: 0.5, 3: 0.1}, "evaluation/default/reward", [1, 4, 5]),
        ({1: 0.9, 2: 0.5, 3: 0.1}, "-evaluation/default/reward", [3, 4, 5]),
        ({1: 0.9, 3: None}, "evaluation/default/reward", [1, 3, 4, 5]),
        ({1: None, 2: None}, "evaluation/default/reward", [1, 2, 4, 5]),
        ({}, "evaluation/default/reward", [4, 5]),
    ],
)
def test_a_checkpoint_whose_evaluation_goes_on_may_become_the_best(
    run: Run, tmp_path: Path, results: dict[int, float | None], asked: str, kept: list[int]
) -> None:
    assert evaluated(run, tmp_path, results, asked, frozenset()) == kept


def test_an_unknown_metric_of_an_evaluation_is_refused_when_one_has_ended(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no metric 'evaluation/held/reward'; did you mean 'evaluation/def"):
        evaluated(run, tmp_path, {1: 0.5, 2: None}, "evaluation/held/reward", frozenset())


def test_held_checkpoints_stay(run: Run, tmp_path: Path) -> None:
    assert evaluated(run, tmp_path, {}, "evaluation/default/reward", frozenset({"step-000002-s"})) == [2, 4, 5]
