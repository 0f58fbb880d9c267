"""Turns a checkpoint of a run into a Hugging Face folder, also while the run trains: `agentrl export --checkpoint`.

The checkpoint is chosen from the run's folder: by its step, the newest one, or the best one by `trainer.keep_best`. It
is read tensor by tensor, without a GPU and without the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import StoreError, UserError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_retention
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Checkpoint
from agentrl.trainer.metrics import evaluation_metrics
from agentrl.trainer.run.step_checkpoint import check_digest
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.weights import streamed_model

LATEST, BEST = "latest", "best"


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that was written."""

    path: Path
    step: int
    bytes: int


def choose(config: RunConfig, lineage: Lineage, which: str, run_dir: Path) -> Checkpoint:
    """The checkpoint `latest`, `best` or of a step. Raises UserError with those that there are."""
    found = surviving(run_dir / CHECKPOINTS, lineage)
    if which == BEST:
        chosen = _best(config, lineage, found)
    else:
        if which != LATEST and not which.isdecimal():
            raise UserError(f"--checkpoint {which}: give a step, {LATEST} or {BEST}")
        chosen = found[-1] if which == LATEST and found else None
        chosen = next((one for one in found if which.isdecimal() and one.record.step == int(which)), chosen)
    if chosen is None:
        there = ", ".join(str(one.record.step) for one in found)
        raise UserError(
            f"--checkpoint {which}: {run_dir / CHECKPOINTS} has "
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
    merged: bool = True,
    verify: bool = False,
    force: bool = False,
) -> Exported:
    """Write the folder `to`, which appears whole. With `verify`, compare the checkpoint's bytes with their SHA-256.

    Raises UserError when `to` has files and not `force`, or when the run trained no adapter and not `merged`;
    StoreError for a checkpoint that was damaged, or deleted meanwhile.
    """
    if to.is_file() or (to.is_dir() and any(to.iterdir()) and not force):
        raise UserError(f"--to: {to} exists; give another folder, or --force to replace it")
    if not merged and not config.trainer.lora.rank:
        raise UserError(f"--adapter: run {config.name} trains no adapter (trainer.lora.rank is 0)")
    try:
        if verify:
            checkpoint_folders.verify(found)
        streamed_model.write(to, found, base_model, config.trainer.lora, config.name, merged=merged)
    except StoreError as error:
        if found.folder.is_dir():
            raise
        raise StoreError(
            f"{found.folder} was deleted while it was read: the run keeps trainer.keep_checkpoints of them; "
            "try again, or take a later step"
        ) from error
    except OSError as error:
        raise UserError(f"--to: cannot write {to}: {error.strerror}") from error
    size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    return Exported(to, found.record.step, size)


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
