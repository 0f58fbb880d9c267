"""Saves a step: its checkpoint, when one is due, and the weights that engines load."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentrl.storage import stored_folders
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord
from agentrl.trainer.models.run_models import parts
from agentrl.trainer.run.trainer_state import Trainer, say, weights_folder
from agentrl.trainer.run_lineage import CHECKPOINTED
from agentrl.trainer.weights import model_export, version_folders
from agentrl.trainer.weights.published import Published
from agentrl.versions.version_sources import ObjectSource
from agentrl.versions.weights_folder import version_of

STEP_TIMES = ("time/wait_for_batch", "time/wait_for_policy", "time/train")
"""The metrics whose sum is the time of a step without its checkpoint."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A step on disk: its record, the weights that engines load, and its checkpoint, if one was due."""

    record: StepRecord
    published: Published
    checkpoint: Checkpoint | None


def write_version(t: Trainer, folder: Path) -> Published:
    """Write the version that the run's engines load, also to object storage and Mooncake if configured. Collective.

    Raises StoreError on every rank when one cannot write.
    """
    adapter = t.config.trainer.lora
    if adapter.publish == "adapter":
        trained = model_export.trainable(t.policy, t.world)
        made = t.world.only_leader(lambda: model_export.adapter_version(folder, trained, t.base_model, adapter))
        made = made or Published()
    else:
        prepares = t.publisher.prepares if t.publisher is not None else lambda: False
        made = t.writer.write(folder, dict(t.policy.trainable()), prepares)
        if problem := t.mooncake.put(folder):
            say(t, f"version {folder.name} is not in the Mooncake store: {problem}")
    t.world.only_leader(partial(upload, t, folder))
    return made


def upload(t: Trainer, folder: Path) -> None:
    """Copy a version to object storage, if configured. Rank 0 only."""
    if t.stored_weights is not None:
        stored_folders.upload(t.stored_weights, folder, folder.name)


def remove_weights(t: Trainer, *, unknown: bool) -> None:
    """Delete the versions that no engine will load any more and no delta needs, also in object storage.

    With `unknown`, delete the folders that are not in the store too, except in object storage: a run of this name in
    another database may have them.
    """
    version_folders.remove(t.weights, partial(t.lineage.unneeded, unknown=unknown))
    t.mooncake.remove(partial(t.lineage.unneeded, unknown=False))
    if t.stored_weights is not None:
        names = [name for name in t.stored_weights.names("") if version_of(name) is not None]
        unneeded = t.lineage.unneeded(names, unknown=False)
        for name in version_folders.without_ancestors(names, unneeded, ObjectSource(t.stored_weights).manifest):
            stored_folders.delete(t.stored_weights, name)


def save(t: Trainer, record: StepRecord) -> Saved:
    """Write a checkpoint when one is due or the run ends, and the weights that engines load. Collective.

    Where every step leaves a checkpoint, this waits until it is durable. Otherwise a crash repeats the steps after the
    newest checkpoint in any case, so a checkpoint is written while the next steps go on.
    """
    start = time.time()
    t.lineage.check()
    stopping = t.stop.is_set() or t.lineage.is_stopping()
    last = stopping or record.step == t.config.steps
    due = t.pace.stepped(record.step, sum(record.metrics.get(name, 0.0) for name in STEP_TIMES)) or last
    due, wait = t.world.share((due, last or t.pace.waits))
    record = replace(record, metrics=record.metrics | {CHECKPOINTED: float(due and wait)})
    collect(t, wait=due)
    made: Checkpoint | None = None
    if due:
        everything = parts(t.models, t.optimizer, t.config.trainer)
        began = time.monotonic()
        writing = checkpoint_writer.begin(t.checkpoints, record, everything, t.world, wait=wait)
        t.pace.begun()
        if wait:
            made, t.checkpointed = writing.finish(), record.step
            t.pace.written(time.monotonic() - began)
        else:
            t.writing = writing
            writing.when_done(lambda: t.pace.written(time.monotonic() - began))
    written_at = time.time()
    published = write_version(t, weights_folder(t, record))
    now = time.time()
    took = {"time/checkpoint": now - start, "time/write_version": now - written_at}
    record = replace(record, metrics=record.metrics | published.metrics | took)
    return Saved(record, published, made)


def collect(t: Trainer, *, wait: bool) -> None:
    """Finish the checkpoint that is being written, if it is ready or with `wait`; then `keep` it."""
    if t.writing is None or not (wait or t.writing.done()):
        return
    made, t.writing = t.writing.finish(), None
    t.checkpointed = made.record.step
    t.lineage.checkpointed(made.record)
    keep(t, made)


def finish_writing(t: Trainer) -> None:
    """Wait until the last checkpoint is on disk, and in the object storage of a run that has one."""
    collect(t, wait=True)
    if t.stored is not None:
        t.stored.wait()


def remove_old(t: Trainer, made: Checkpoint | None) -> None:
    """Delete the checkpoints and weights that a completed step replaces; begin to upload its checkpoint."""
    if made:
        keep(t, made)
    if t.world.leads:
        remove_weights(t, unknown=False)


def keep(t: Trainer, newest: Checkpoint) -> None:
    """Delete the older checkpoints that are no longer kept, and begin to upload the newest, on rank 0."""
    if t.world.leads:
        deleted = checkpoint_folders.remove_older(newest, t.config.trainer)
        if t.stored is not None:
            t.stored.send(newest.folder, deleted)
