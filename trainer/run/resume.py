"""Brings store, checkpoint and engines to one step when a trainer starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import ResumePlan
from agentrl.files import remove_drafts
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Checkpoint, Ignored
from agentrl.trainer.checkpoints.checkpoint_folders import Check
from agentrl.trainer.models.run_models import restore
from agentrl.trainer.run import step_checkpoint
from agentrl.trainer.run.publish_step import publish
from agentrl.trainer.run.saved_step import remove_weights, write_version
from agentrl.trainer.run.trainer_state import Trainer, say, weights_folder
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.saved_models import MODELS


def resume(t: Trainer) -> None:
    """Bring store, checkpoint and engines to one step. Collective."""
    found, plan = t.world.from_leader(partial(choose_step, t))
    t.step = t.checkpointed = plan.step
    t.version = found.record.version if found and plan.roll_forward else plan.version
    if found:
        restore(found, t.models, t.optimizer, t.config.trainer, t.world)
    made: Published | None = None
    if found:
        made = write_version(t, t.world.from_leader(partial(version_folder, t, found, plan)))
    republish = t.world.from_leader(partial(restore_store, t, found, plan, made))
    if republish is not None:
        publish(t, republish, made if republish == t.version else None)


def choose_step(t: Trainer) -> tuple[Checkpoint | None, ResumePlan]:
    """The checkpoint to resume from, if there is one, and the store's plan. Rank 0 only.

    Fetches a newer checkpoint from object storage first. Brings the store to the checkpoint's step, sets newer folders
    aside, and deletes the versions of lost steps: the checkpoint's version may need their room on the disk.
    """
    for parent in (t.checkpoints, t.weights, t.config.run_dir / MODELS):
        remove_drafts(parent)
    if t.stored is not None:
        fetched = partial(step_checkpoint.check_fetched, t)
        t.stored.fetch(t.checkpoints, t.lineage.survives, partial(say, t), fetched)
    check = partial(step_checkpoint.check, t)
    found, ignored = find_checkpoint(t.config, t.lineage, from_base=t.from_base, check=check)
    plan = t.lineage.reconcile(found.record.batch.step_id if found else None)
    for unusable in ignored:
        aside = checkpoint_folders.set_aside(unusable)
        say(t, f"ignoring checkpoint {unusable.folder}: {unusable.why} (set aside as {aside.name})")
    remove_weights(t, unknown=False)
    if found and t.stored is not None:
        t.stored.send(checkpoint_folders.folders(t.checkpoints)[::-1])  # an upload may have been interrupted
    return found, plan


def version_folder(t: Trainer, found: Checkpoint, plan: ResumePlan) -> Path:
    """The folder of the version that a checkpoint is. Rank 0 only."""
    known = None if plan.roll_forward else t.lineage.version_path(found.record.version)
    return t.weights / Path(known).name if known else weights_folder(t, found.record)


def restore_store(t: Trainer, found: Checkpoint | None, plan: ResumePlan, made: Published | None) -> int | None:
    """Complete the checkpoint's step in the store, which `made` is the version of. Rank 0 only.

    Returns the version to publish, if any.
    """
    republish = plan.republish
    if found and made:
        if plan.roll_forward:
            t.lineage.complete(found.record, made.path, made.checksum)
            republish = t.version
            say(t, f"step {t.step} was checkpointed but not recorded: completed it")
        else:
            t.lineage.remade(found.record.version, made.path, made.checksum)
        t.lineage.checkpointed(found)  # the trainer may have died before it recorded this
        step_checkpoint.offer_models(t)
    remove_weights(t, unknown=True)
    if plan.rolled_back_steps:
        say(t, f"rolled back steps {plan.rolled_back_steps}: they have no checkpoint")
    if t.step:
        say(t, f"resuming after step {t.step}, version {t.version}")
    return republish


def find_checkpoint(
    config: RunConfig, lineage: Lineage, *, from_base: bool = False, check: Check | None = None
) -> tuple[Checkpoint | None, list[Ignored]]:
    """The checkpoint to resume from, and the newer ones that cannot be used. Reads only.

    `check` replaces the comparison with the digest in the store. Raises UserError when the run had checkpoints and none
    is left, unless `from_base`.
    """
    root = config.run_dir / CHECKPOINTS

    def check_recorded(found: Checkpoint) -> None:
        step_checkpoint.check_digest(found, lineage.checkpoint_digest(found.record.batch.step_id))

    found, ignored = checkpoint_folders.newest(root, lineage.survives, check or check_recorded)
    if found is None and not from_base:
        lineage.require_no_checkpoint(root, ignored)
    return found, ignored
