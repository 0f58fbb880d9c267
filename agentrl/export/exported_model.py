"""Turns a checkpoint of a run into a Hugging Face folder, also while the run trains: `agentrl export --checkpoint`.
`--average` takes the running average of the weights, `--merge` the mean of several checkpoints.

The checkpoint is chosen from the run's folder: by its step, the newest one, or the best one by `trainer.keep_best`. It
is read tensor by tensor, without a GPU and without the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import StoreError, UserError
from agentrl.trainer.averages import weight_average
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_retention
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Checkpoint
from agentrl.trainer.metrics import evaluation_metrics
from agentrl.trainer.run.step_checkpoint import check_digest
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.weights import streamed_model

LATEST, BEST = "latest", "best"
MOST_MERGED, MOST_WEIGHT = 64, 1e6


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that was written."""

    path: Path
    steps: tuple[int, ...]  # of the checkpoints that it was made of
    bytes: int


def choose(
    config: RunConfig, lineage: Lineage, which: str, run_dir: Path, *, option: str = "--checkpoint"
) -> Checkpoint:
    """The checkpoint `latest`, `best` or of a step. Raises UserError with those that there are."""
    found = surviving(run_dir / CHECKPOINTS, lineage)
    if which == BEST:
        chosen = _best(config, lineage, found)
    else:
        if which != LATEST and not which.isdecimal():
            raise UserError(f"{option} {which}: give a step, {LATEST} or {BEST}")
        chosen = found[-1] if which == LATEST and found else None
        chosen = next((one for one in found if which.isdecimal() and one.record.step == int(which)), chosen)
    if chosen is None:
        there = ", ".join(str(one.record.step) for one in found)
        raise UserError(
            f"{option} {which}: {run_dir / CHECKPOINTS} has "
            + (f"the checkpoints of steps {there}" if there else "no checkpoint of the run")
        )
    return chosen


def surviving(root: Path, lineage: Lineage) -> list[Checkpoint]:
    """The usable checkpoints of the run's surviving lineage, oldest first."""
    usable = []
    for folder in checkpoint_folders.folders(root):
        try:
            found = checkpoint_folders.read(folder)
            check_digest(found, lineage.checkpoint_digest(found.record.batch.step_id))
        except StoreError:  # damaged, or another one than the store has
            continue
        if lineage.survives(found.record.batch.step_id):
            usable.append(found)
    return usable


def write(
    found: Checkpoint,
    to: Path,
    config: RunConfig,
    base_model: Path,
    *,
    average: bool = False,
    merged: bool = True,
    verify: bool = False,
    force: bool = False,
) -> Exported:
    """Write the folder `to`, which appears whole: the checkpoint's weights, or with `average` their running average.
    With `verify`, compare the checkpoint's bytes with their SHA-256.

    Raises UserError when `to` has files and not `force`, when the run trained no adapter and not `merged`, or when it
    has no average; StoreError for a checkpoint that was damaged, or deleted meanwhile.
    """
    if not merged and not config.trainer.lora.rank:
        raise UserError(f"--adapter: run {config.name} trains no adapter (trainer.lora.rank is 0)")
    part = _part(config, average=average)
    with _writing([found], to, verify=verify, force=force):
        streamed_model.write(to, found, base_model, config.trainer.lora, config.name, part=part, merged=merged)
    return _exported(to, [found])


def write_mean(
    found: Sequence[tuple[Checkpoint, float]],
    to: Path,
    config: RunConfig,
    base_model: Path,
    *,
    average: bool = False,
    verify: bool = False,
    force: bool = False,
) -> Exported:
    """Write the weighted mean of checkpoints of the run, or with `average` of their running averages, as `write`."""
    part, checkpoints = _part(config, average=average), [one for one, _ in found]
    with _writing(checkpoints, to, verify=verify, force=force):
        streamed_model.write_mean(to, found, base_model, config.trainer.lora, config.name, part=part)
    return _exported(to, checkpoints)


def weighted(text: str) -> list[tuple[str, float]]:
    """The checkpoints of `--merge` with their weights: `100,200,latest`, or `100:1,200:3`. Raises UserError."""
    found = []
    for one in text.split(","):
        which, colon, given = one.strip().partition(":")
        try:
            weight = float(given) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not which or not 0 < weight <= MOST_WEIGHT:
            raise UserError(
                f"--merge {text}: {one!r} is no CHECKPOINT or CHECKPOINT:WEIGHT with a weight above 0 and at most "
                f"{MOST_WEIGHT:g}"
            )
        found.append((which, weight))
    if not 2 <= len(found) <= MOST_MERGED:
        raise UserError(f"--merge {text}: give 2 to {MOST_MERGED} checkpoints")
    return found


def _part(config: RunConfig, *, average: bool) -> str:
    if average and config.trainer.average is None:
        raise UserError(f"--average: run {config.name} keeps none (trainer.average is null)")
    return weight_average.PART if average else streamed_model.POLICY


@contextmanager
def _writing(found: Sequence[Checkpoint], to: Path, *, verify: bool, force: bool) -> Iterator[None]:
    """Check what is read and what is in the way; errors of the block name it. Raises UserError and StoreError."""
    if to.is_file() or (to.is_dir() and any(to.iterdir()) and not force):
        raise UserError(f"--to: {to} exists; give another folder, or --force to replace it")
    try:
        for one in found if verify else ():
            checkpoint_folders.verify(one)
        yield
    except StoreError as error:
        lost = next((one for one in found if not one.folder.is_dir()), None)
        if lost is None:
            raise
        raise StoreError(
            f"{lost.folder} was deleted while it was read: the run keeps trainer.keep_checkpoints of them; "
            "try again, or take a later step"
        ) from error
    except OSError as error:
        raise UserError(f"--to: cannot write {to}: {error.strerror}") from error


def _exported(to: Path, found: Sequence[Checkpoint]) -> Exported:
    size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    return Exported(to, tuple(one.record.step for one in found), size)


def _best(config: RunConfig, lineage: Lineage, found: list[Checkpoint]) -> Checkpoint | None:
    """The best checkpoint by `trainer.keep_best`. Raises UserError when the run has no such setting."""
    asked = config.trainer.keep_best
    if asked is None:
        raise UserError(f"--checkpoint {BEST}: run {config.name} has no trainer.keep_best; give a step or {LATEST}")

    def scores(one: Checkpoint) -> dict[str, float]:
        evaluation = lineage.evaluation(one.record.version) if config.trainer.keeps_best_evaluated else None
        return {} if evaluation is None or not evaluation.complete else evaluation_metrics.metrics(evaluation)

    best, _ = checkpoint_retention.best_of([one.folder for one in found], asked, scores)
    return next((one for one in found if one.folder == best), None)
