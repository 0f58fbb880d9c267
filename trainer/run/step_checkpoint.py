"""The checkpoints of a run's steps: when one is due, how it is written beside the next steps, and which are kept.

    begin     due? ──► a thread writes it: with `checkpoint_every: 1` and at the last step from the parameters, and the
                       step waits; otherwise from a copy, and the next steps go on
    collect   complete in the run's folder ──► in the store, with its digest ──► older ones are deleted, upload begins

One checkpoint is written at a time, so a rank holds at most one copy of its part in memory. With `checkpoint_every:
auto`, steps never wait for the one before (checkpoint_pace.py). A checkpoint that cannot be written ends the trainer at
the next save, with the rank and the folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from agentrl.domain import evaluation
from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_retention, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord
from agentrl.trainer.metrics import evaluation_metrics
from agentrl.trainer.models.run_models import parts
from agentrl.trainer.run.trainer_state import Trainer, say
from agentrl.trainer.run_lineage import CHECKPOINTED

STEP_TIMES = ("time/wait_for_batch", "time/wait_for_policy", "time/train")
"""The metrics whose sum is the time of a step without its checkpoint."""
OPEN_EVALUATIONS = 2
"""Evaluations that may begin: the newest due one, and the one before while the newest is not published."""


def begin(t: Trainer, record: StepRecord) -> tuple[StepRecord, bool]:
    """Begin the step's checkpoint if one is due or the run ends. Collective.

    Returns the record that the step is completed with, and whether the step must wait for its checkpoint (`finish`).
    Raises StoreError when the checkpoint before could not be written.
    """
    stopping = t.stop.is_set() or t.lineage.is_stopping()
    last = stopping or record.step == t.config.steps
    paced = t.pace.stepped(record.step, sum(record.metrics.get(name, 0.0) for name in STEP_TIMES))
    due, wait = t.world.share((paced or last or is_wanted(t, record.step), last or t.pace.waits))
    wait = due and wait
    record = replace(record, metrics=record.metrics | {CHECKPOINTED: float(wait)})
    collect(t, wait=due)
    if due:
        began = time.monotonic()
        everything = parts(t.models, t.optimizer, t.config.trainer)
        writing = checkpoint_writer.begin(t.checkpoints, record, everything, t.world, copied=not wait)
        t.pace.begun()
        t.writing = writing
        writing.when_done(lambda: t.pace.written(time.monotonic() - began))
    return record, wait


def is_wanted(t: Trainer, step: int) -> bool:
    """Whether something else than a resume needs the step's checkpoint: the choice of the best evaluated one, or a
    folder of the model.
    """
    config = t.config.trainer
    evaluated = config.keeps_best_evaluated and step in evaluation.schedule(t.config.evaluation.every, t.config.steps)
    return evaluated or (config.save_every is not None and step % config.save_every == 0)


def finish(t: Trainer) -> Checkpoint:
    """Wait until the checkpoint that was begun is complete. Raises StoreError."""
    assert t.writing is not None
    writing, t.writing = t.writing, None
    made = writing.finish()
    t.checkpointed = made.record.step
    t.lineage.record(
        "checkpoint", writing.began, made.written_at, step=made.record.step, bytes=made.size_bytes, digest=made.digest
    )
    return made


def collect(t: Trainer, *, wait: bool) -> None:
    """Finish the checkpoint that is being written, if it is ready or with `wait`; then `keep` it. Raises StoreError."""
    if t.writing is not None and (wait or t.writing.done()):
        keep(t, finish(t))


def finish_all(t: Trainer) -> None:
    """Wait until the last checkpoint is on disk, and in the object storage of a run that has one, and until the models
    of checkpoints are written. Then no checkpoint is held any more.
    """
    collect(t, wait=True)
    if not t.world.leads:
        return
    for keeper in (t.stored, t.saved_models):
        if keeper is not None:
            keeper.wait()
    if kept := checkpoint_folders.folders(t.checkpoints):
        clean(t, checkpoint_folders.read(kept[-1]))
    if t.stored is not None:
        t.stored.wait()
        t.lineage.stored(t.stored.arrived())


def offer_models(t: Trainer) -> None:
    """Write the model's folders that checkpoints on disk should have and have not, on rank 0 of a resumed run."""
    if t.saved_models is None:
        return
    for folder in checkpoint_folders.folders(t.checkpoints):
        try:
            t.saved_models.offer(checkpoint_folders.read(folder))
        except StoreError as error:
            say(t, f"no model of {folder.name}: {error}")


def keep(t: Trainer, made: Checkpoint) -> None:
    """Record a checkpoint of a completed step, begin to write its model's folder, delete those checkpoints that it
    replaces, and begin to upload it, on rank 0.
    """
    if t.world.leads:
        t.lineage.checkpointed(made)
        if t.saved_models is not None:
            t.saved_models.offer(made)
        clean(t, made)


def clean(t: Trainer, newest: Checkpoint) -> None:
    """Delete the checkpoints that are no longer kept, and upload those that are. Rank 0 only."""
    held = set[str]().union(*(keeper.held() for keeper in (t.stored, t.saved_models) if keeper is not None))
    deleting = t.stored.delete_later if t.stored is not None else lambda names: None
    checkpoint_retention.remove_older(
        newest, t.config.trainer, lambda found: scores(t, found, newest), held, deleting=deleting
    )
    if t.stored is not None:
        t.lineage.stored(t.stored.arrived())
        t.stored.send(checkpoint_folders.folders(t.checkpoints)[::-1])


def scores(t: Trainer, found: Checkpoint, newest: Checkpoint) -> Mapping[str, float] | None:
    """The metrics of the evaluation of a checkpoint's version, where `keep_best` names one.

    None while they may come: the evaluation has begun, or is one of the newest that are due. Rollout workers run one
    evaluation after another, so one that is not complete when a later one is will never be.
    """
    if not t.config.trainer.keeps_best_evaluated:
        return {}
    step, version = found.record.step, found.record.version
    due = [one for one in evaluation.schedule(t.config.evaluation.every, t.config.steps) if one <= newest.record.step]
    if step not in due:
        return {}
    if version not in t.evaluated:
        result = t.lineage.evaluation(version)
        if result is None or not result.complete:
            may_come = step in due[-OPEN_EVALUATIONS:] if result is None else version > max(t.evaluated, default=0)
            return None if may_come else {}
        t.evaluated[version] = evaluation_metrics.metrics(result)
    return t.evaluated[version]


def check(t: Trainer, found: Checkpoint) -> None:
    """Raise StoreError for a checkpoint that is not the one that was recorded, or with `verify_checkpoint` has changed
    since it was written.
    """
    check_digest(found, t.lineage.checkpoint_digest(found.record.batch.step_id))
    if t.config.trainer.verify_checkpoint:
        checkpoint_folders.verify(found)


def check_fetched(t: Trainer, found: Checkpoint) -> None:
    """Raise StoreError for a checkpoint from object storage that differs from the one that was recorded or written."""
    check_digest(found, t.lineage.checkpoint_digest(found.record.batch.step_id))
    checkpoint_folders.verify(found)


def check_digest(found: Checkpoint, recorded: str | None) -> None:
    """Raise StoreError when another digest was recorded for a checkpoint's step."""
    if recorded not in (None, found.digest):
        raise StoreError(f"its digest is {found.digest[:16]}…, the store has {recorded[:16]}… for its step")
