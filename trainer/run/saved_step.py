"""Saves a step: its checkpoint, when one is due, and the weights that engines load."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from agentrl.configs.run_config import RunConfig
from agentrl.storage import stored_folders
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord
from agentrl.trainer.publish import weights
from agentrl.trainer.publish.weights import Published
from agentrl.trainer.run import step_checkpoint
from agentrl.trainer.run.trainer_start import engine_device
from agentrl.trainer.run.trainer_state import Trainer, weights_folder
from agentrl.versions.weights_folder import version_of

NOT_PUBLISHED = Published(Path(), "", {})
"""The value on ranks other than 0, which write no weights folder."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A step on disk: its record, the weights that engines load, and its checkpoint, if one was due."""

    record: StepRecord
    published: Published
    checkpoint: Checkpoint | None


def publishable(t: Trainer, folder: Path, trained: dict[str, torch.Tensor]) -> Published:
    """Write the version that the run's engines load, also to object storage if configured. Rank 0 only."""
    dtype = engine_dtype(t.config, t.world.device)
    made = weights.publishable(folder, trained, t.base_model, t.policy.names, t.config.trainer.lora, dtype)
    if t.stored_weights is not None:
        stored_folders.upload(t.stored_weights, folder, folder.name)
    return made


def remove_weights(t: Trainer, *, unknown: bool) -> None:
    """Delete the versions that no engine will load any more, also in object storage.

    With `unknown`, delete the folders that are not in the store too, except in object storage: a run of this name in
    another database may have them.
    """
    weights.remove(t.weights, partial(t.lineage.unneeded, unknown=unknown))
    if t.stored_weights is not None:
        names = [name for name in t.stored_weights.names("") if version_of(name) is not None]
        for name in t.lineage.unneeded(names, unknown=False):
            stored_folders.delete(t.stored_weights, name)


def engine_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type in which engines keep matrices. Engines whose device is not configured have the trainer's, `device`."""
    dtype: torch.dtype = getattr(torch, config.engine.dtype_on(engine_device(config, device)))
    return dtype


def save(t: Trainer, record: StepRecord) -> Saved:
    """Write a checkpoint when one is due or the run ends, and the weights that engines load. Collective.

    With `checkpoint_every: 1` and at the last step, this waits until the checkpoint is durable, which a thread writes
    beside the weights. Otherwise a crash repeats the steps after the newest checkpoint in any case, so the checkpoint
    is written while the next steps go on.
    """
    start = time.time()
    t.lineage.check()
    record, wait = step_checkpoint.begin(t, record)
    trained = weights.trainable(t.policy, t.world)
    published = t.world.only_leader(lambda: publishable(t, weights_folder(t, record), trained)) or NOT_PUBLISHED
    made = step_checkpoint.finish(t) if wait else None
    record = replace(record, metrics=record.metrics | {"time/checkpoint": time.time() - start})
    return Saved(record, published, made)


def remove_old(t: Trainer, made: Checkpoint | None) -> None:
    """Delete the checkpoints and weights that a completed step replaces; begin to upload its checkpoint."""
    if made:
        step_checkpoint.keep(t, made)
    if t.world.leads:
        remove_weights(t, unknown=False)
