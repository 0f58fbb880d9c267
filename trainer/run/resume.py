"""Brings store, checkpoint and engines to one step when a trainer starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import ResumePlan
from agentrl.files import remove_drafts
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Checkpoint, Ignored
from agentrl.trainer.lineage import Lineage
from agentrl.trainer.models.run_models import restore
from agentrl.trainer.publish import weights
from agentrl.trainer.run.publish_step import publish
from agentrl.trainer.run.saved_step import publishable
from agentrl.trainer.run.trainer_state import Trainer, say, weights_folder


def resume(t: Trainer) -> None:
    """Bring store, checkpoint and engines to one step. Collective."""
    found: Checkpoint | None = None
    plan: ResumePlan | None = None
    if t.lineage:
        for parent in (t.checkpoints, t.weights):
            remove_drafts(parent)
        found, ignored = find_checkpoint(t.config, t.lineage, from_base=t.from_base)
        plan = t.lineage.reconcile(found.record.batch.step_id if found else None)
        for unusable in ignored:
            aside = checkpoint_folders.set_aside(unusable)
            say(t, f"ignoring checkpoint {unusable.folder}: {unusable.why} (set aside as {aside.name})")
    found, plan = t.world.share((found, plan))
    assert plan is not None
    t.step = t.checkpointed = plan.step
    t.version = found.record.version if found and plan.roll_forward else plan.version
    if found:
        restore(found, t.models, t.optimizer, t.config.trainer, t.world)
    trained = weights.trainable(t.policy, t.world) if found else {}
    republish, tensors = take_up(t, found, plan, trained) if t.lineage else (None, {})
    republish = t.world.share(republish)
    if republish is not None:
        publish(t, republish, tensors)


def take_up(
    t: Trainer, found: Checkpoint | None, plan: ResumePlan, trained: dict[str, torch.Tensor]
) -> tuple[int | None, dict[str, torch.Tensor]]:
    """Bring the store to the checkpoint, whose parameters are in `trained`; returns the version to publish, if any.

    With it its tensors, where they are known.
    """
    assert t.lineage is not None
    republish, tensors = plan.republish, dict[str, torch.Tensor]()
    if found:
        known = None if plan.roll_forward else t.lineage.version_path(found.record.version)
        folder = t.weights / Path(known).name if known else weights_folder(t, found.record)
        made = publishable(t, folder, trained)
        tensors = made.tensors
        if plan.roll_forward:
            t.lineage.complete(found.record, made.path, made.checksum)
            republish = t.version
            say(t, f"step {t.step} was checkpointed but not recorded: completed it")
        else:
            t.lineage.remade(found.record.version, made.path, made.checksum)
    weights.remove(t.weights, partial(t.lineage.unneeded, strangers=True))
    if plan.rolled_back_steps:
        say(t, f"rolled back steps {plan.rolled_back_steps}: they have no checkpoint")
    if t.step:
        say(t, f"resuming after step {t.step}, version {t.version}")
    return republish, tensors if republish == t.version else {}


def find_checkpoint(
    config: RunConfig, lineage: Lineage, *, from_base: bool = False
) -> tuple[Checkpoint | None, list[Ignored]]:
    """What to resume from, and what is newer and cannot be. Raises UserError when there should be one and is none."""
    root = config.run_dir / CHECKPOINTS
    found, ignored = checkpoint_folders.newest(root, lineage.survives)
    if found is None and not from_base:
        lineage.require_no_checkpoint(root, ignored)
    return found, ignored
