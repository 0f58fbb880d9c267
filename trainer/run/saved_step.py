"""Saves a step: its checkpoint, when one is due, and the weights that engines load."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentrl.storage import stored_folders
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord
from agentrl.trainer.run import step_checkpoint
from agentrl.trainer.run.trainer_state import Trainer, say, weights_folder
from agentrl.trainer.weights import model_export
from agentrl.trainer.weights.published import Published
from agentrl.versions import version_removal
from agentrl.versions.version_sources import ObjectSource
from agentrl.versions.weights_folder import version_of


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
    version_removal.remove(t.weights, partial(t.lineage.unneeded, unknown=unknown))
    t.mooncake.remove(partial(t.lineage.unneeded, unknown=False))
    if t.stored_weights is not None:
        names = [name for name in t.stored_weights.names("") if version_of(name) is not None]
        unneeded = t.lineage.unneeded(names, unknown=False)
        for name in version_removal.without_ancestors(names, unneeded, ObjectSource(t.stored_weights).manifest):
            stored_folders.delete(t.stored_weights, name)


def save(t: Trainer, record: StepRecord) -> Saved:
    """Write a checkpoint when one is due or the run ends, and the weights that engines load. Collective.

    With `checkpoint_every: 1` and at the last step, this waits until the checkpoint is durable, which a thread writes
    beside the weights. Otherwise a crash repeats the steps after the newest checkpoint in any case, so the checkpoint
    is written while the next steps go on.
    """
    start = time.time()
    t.lineage.check()
    record, wait = step_checkpoint.begin(t, record)
    written_at = time.time()
    published = write_version(t, weights_folder(t, record))
    took = {"time/write_version": time.time() - written_at}
    made = step_checkpoint.finish(t) if wait else None
    took["time/checkpoint"] = time.time() - start
    record = replace(record, metrics=record.metrics | published.metrics | took)
    return Saved(record, published, made)


def remove_old(t: Trainer, made: Checkpoint | None) -> None:
    """Delete the checkpoints and weights that a completed step replaces; begin to upload its checkpoint."""
    if made:
        step_checkpoint.keep(t, made)
    if t.world.leads:
        remove_weights(t, unknown=False)
