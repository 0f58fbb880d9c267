"""The trainer's loop.

      store                        rank 0 (all ranks where marked ∀)                          proxy
        │  begin_epoch, reconcile ◄── start: newest complete checkpoint ∀ loaded
        │  complete ◄──────────────── roll forward, if the checkpoint is ahead of the store
        │                             republish, if the engines may not serve its version ──────► publish
        │
        │  ┌──────────────────────────────────────────────────────────────────────────────┐
        ├──┼─ lease ────────────────► batch ∀                                               │
        │  │                           └► advantages ∀ ─► update ∀ ─► checkpoint ∀ (durable)│
        ├──┼─ complete {trained, version pending} ◄───────────────────┘                     │
        │  │                                            └─ publish ─────────────────────────┼──► engines load vN
        │  └────────────────────────── next step ◄─────────────────── vN serves ◄───────────┘
        ▼
   run finished: the whole model is exported

Who waits for whom:

    lease      waits until enough groups are ready; agents unblock it
    step       where trainer and engines take turns on the same GPUs (`gpu_turn`), waits until engines have released
               their memory; their calls wait until the publish
    publish    waits for the proxy, which waits for its engines; with `evaluation.hold` it waits first for the
               evaluation of the version that is served
    admission  in the proxy, starts no new group that would become older than max_staleness; nothing else waits for
               the trainer

SIGTERM, SIGINT and the run status `stopping` end every wait. They never interrupt a step: the trainer finishes,
checkpoints and completes it first. ∀ marks the work of every rank; rank 0 alone does the rest (run_lineage.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Batch, TrainedBatch
from agentrl.errors import NonFiniteError
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.distributed import World
from agentrl.trainer.learning_rate import learning_rate, set_learning_rate
from agentrl.trainer.metrics.batch_metrics import finite
from agentrl.trainer.models.run_models import after_step, make_models
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.publish import weights
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run import gpu_turn
from agentrl.trainer.run.publish_step import publish
from agentrl.trainer.run.resume import resume
from agentrl.trainer.run.saved_step import finish_writing, remove_old, save
from agentrl.trainer.run.step_report import line, sinks_of, step_metrics, trained_trajectories
from agentrl.trainer.run.stored_checkpoints import stored_checkpoints, stored_weights
from agentrl.trainer.run.trainer_state import Trainer, say
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.stop import Stop
from agentrl.trainer.update import update_policy

HEARTBEAT_S = 60.0
"""How often rank 0 tells the other ranks that it still waits: far below the time-out of collective calls."""


def train(
    config: RunConfig,
    base_model: Path,
    world: World,
    lineage: Lineage,
    publisher: Publisher | None,
    stop: Stop,
    *,
    from_base: bool = False,
) -> bool:
    """Train until the run has its steps (true) or is told to stop (false). Collective.

    Raises FencedError when a newer trainer has started, and UserError when a run that had checkpoints has none that can
    be used. With `from_base` such a run is rolled back instead, and trained again from the base weights.
    """
    torch.manual_seed(config.seed)
    models = make_models(base_model, config.trainer, world)
    optimizer = make_optimizer(models.policy, config.trainer)
    t = Trainer(config, base_model, world, models, optimizer, lineage, publisher, stop, from_base)
    if world.leads:
        t.stored, t.stored_weights = stored_checkpoints(config), stored_weights(config)
    if t.policy.unpacked:
        say(t, f"every sequence is computed by itself, which is slower: {t.policy.unpacked}")
    resume(t)
    with sinks_of(t), closing_turns(t):
        while t.step < config.steps:
            batch, waited_s = next_batch(t)
            if batch is None or not gpu_turn.take(t):
                finish_writing(t)
                if t.checkpointed < t.step:
                    say(t, f"stopping: steps {t.checkpointed + 1} to {t.step} have no checkpoint and will be repeated")
                return False
            train_step(t, batch, waited_s)
        finish_writing(t)
        weights.export(config.run_dir, t.policy, base_model, config.trainer.lora, world)
        t.lineage.finish()
        say(t, f"finished: {t.step} steps, model in {config.run_dir / 'model'}")
        t.evaluations.wait_for_last(t.version, t.stop.wait, config.evaluation.hold_timeout_s)
    return True


@contextmanager
def closing_turns(t: Trainer) -> Iterator[None]:
    """Stop renewing the lease on the engines' GPUs when the block ends, also within a step."""
    try:
        yield
    finally:
        gpu_turn.stop(t)


def next_batch(t: Trainer) -> tuple[Batch | None, float]:
    """The next step's batch and the seconds waited for it; None when told to stop. Collective."""
    start = time.time()
    while True:
        stopping = t.stop.is_set() or t.lineage.is_stopping()
        batch = None if stopping else t.lineage.wait_for_batch(t.step + 1, HEARTBEAT_S, t.stop.wait)
        batch, stopping = t.world.share((batch, stopping))
        if stopping:
            return None, 0.0
        if batch is not None:
            end = time.time()
            t.lineage.record("wait_for_batch", start, end, step=batch.step)
            return batch, end - start


def train_step(t: Trainer, batch: Batch, waited_s: float) -> None:
    """Update on a leased batch; make the step durable, record it and publish its version. Collective."""
    start = time.time()
    config = t.config.trainer
    samples = make_samples(batch.trajectories, config.algorithm, t.models, config.tokens_per_microbatch, t.world)
    trained = trained_trajectories(batch, samples)
    lr = learning_rate(batch.step, t.config.steps, config)
    set_learning_rate(t.optimizer, lr)
    if t.models.critic:
        set_learning_rate(t.models.critic.optimizer, config.critic_lr * lr / config.lr)
    metrics = update_policy(
        t.policy,
        t.optimizer,
        samples,
        batch.version,
        batch.ages,
        config,
        t.world,
        t.models.critic,
        partial(on_nonfinite, t, batch.step),
    )
    after_step(t.models, batch.step, config)
    updated = time.time()
    version = t.world.share(t.lineage.next_version())
    record = StepRecord(
        step=batch.step,
        version=version,
        batch=TrainedBatch(
            step_id=batch.step_id,
            digest=batch.digest(),
            estimator=config.algorithm.preset,
            wasted_tokens=batch.wasted_tokens,
            trained=trained,
        ),
        metrics=finite(step_metrics(t, batch, samples, metrics | {"lr": lr}, waited_s, updated - start)),
    )
    saved = save(t, record)
    t.lineage.complete(saved.record, saved.published.path, saved.published.checksum)
    remove_old(t, saved.checkpoint)  # after `complete`, which raises in an overtaken trainer
    gpu_turn.give(t)
    t.lineage.record("train_step", start, time.time(), step=batch.step, version=version, updated=updated)
    say(t, line(t, saved.record))
    t.sinks.log(saved.record.step, saved.record.metrics)
    t.evaluations.send()
    publish(t, version, saved.published.tensors)
    t.step, t.version = batch.step, version


def on_nonfinite(t: Trainer, step: int, found: NonFinite) -> None:
    """Record the finding on the timeline. Raise NonFiniteError, or return to skip the minibatch, as configured."""
    action = t.config.trainer.nonfinite
    now, named = time.time(), list(found.trajectories)
    t.lineage.record("nonfinite", now, now, step=step, does=action, message=str(found), trajectories=named)
    if action == "stop":
        raise NonFiniteError(f"step {step}: {found} (trainer.nonfinite: skip would leave this out)")
    say(t, f"step {step}: {found}: skipped")
