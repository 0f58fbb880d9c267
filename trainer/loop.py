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

Who waits for whom: `lease` waits until enough groups are ready, which agents unblock; `publish` waits for the proxy,
which waits for its engines, and with `evaluation.hold` for the evaluation of what they serve; nobody waits for the
trainer, except that admission stops new groups once they would be older than max_staleness. Stopping (SIGTERM, SIGINT,
run status `stopping`) ends any wait, and never cuts a step short: the step in hand is finished, checkpointed and
completed first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from agentrl import visible
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Batch, ResumePlan, TrainedBatch
from agentrl.errors import NonFiniteError
from agentrl.files import remove_drafts
from agentrl.trainer import checkpoint
from agentrl.trainer.checkpoint import Checkpoint, Ignored, StepRecord, Writing
from agentrl.trainer.distributed import World
from agentrl.trainer.evaluation_hold import wait_for_evaluation
from agentrl.trainer.learning_rate import learning_rate, set_learning_rate
from agentrl.trainer.lineage import CHECKPOINTED, Lineage, trained_trajectories
from agentrl.trainer.metrics.batch_metrics import Metrics, batch_metrics, finite, outcome_metrics
from agentrl.trainer.metrics.evaluation_metrics import Evaluated
from agentrl.trainer.metrics.flops import peak_flops
from agentrl.trainer.metrics.metric_sinks import Sinks, wanted
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.run_models import Models, after_step, make_models, parts, restore
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.packing import Sample
from agentrl.trainer.publish import weights
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.publish.weights import Published
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import make_optimizer, update_policy
from agentrl.weights_folder import folder_name

CHECKPOINTS = "checkpoints"
WAITING = "rank 0 waits"
HEARTBEAT_S = 60.0
"""Other ranks hear from a waiting rank 0 this often, far below the collectives' time-out."""


class Stop:
    """Set by a signal; `wait` is a sleep that a signal ends."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> None:
        """Take SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def set(self) -> None:
        """As if signalled."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep; true at once when stopping."""
        return self._event.wait(seconds)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.set()


@dataclass(slots=True)
class Trainer:
    """What the loop holds. `lineage`, `publisher`, `sinks`, `evaluated` exist on rank 0 only."""

    config: RunConfig
    base_model: Path
    world: World
    models: Models
    optimizer: torch.optim.Optimizer
    lineage: Lineage | None
    publisher: Publisher | None
    stop: Stop
    from_base: bool = False
    step: int = 0
    version: int = 0
    checkpointed: int = 0  # the step of the newest checkpoint
    writing: Writing | None = None  # a checkpoint on its way to the disk
    publish_s: float = 0.0
    sinks: Sinks | None = None
    evaluated: Evaluated | None = None  # where evaluations have sinks to go to

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self.models.policy

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.config.run_dir / CHECKPOINTS

    @property
    def weights(self) -> Path:
        """Folder of what engines load."""
        return self.config.run_dir / "weights"


def train(
    config: RunConfig,
    base_model: Path,
    world: World,
    lineage: Lineage | None,
    publisher: Publisher | None,
    stop: Stop,
    *,
    from_base: bool = False,
) -> bool:
    """Train until the run has its steps (true) or is told to stop (false). Collective.

    Raises FencedError when a newer trainer has started, UserError when a run that had checkpoints has none that can be
    resumed from; with `from_base` its steps are rolled back instead, and trained again from the base weights.
    """
    torch.manual_seed(config.seed)
    models = make_models(base_model, config.trainer, world)
    optimizer = make_optimizer(models.policy, config.trainer)
    t = Trainer(config, base_model, world, models, optimizer, lineage, publisher, stop, from_base)
    if t.policy.unpacked:
        say(t, f"every sequence is computed by itself, which is slower: {t.policy.unpacked}")
    resume(t)
    with sinks_of(t):
        while t.step < config.steps:
            batch, waited_s = next_batch(t)
            if batch is None:
                collect(t, wait=True)
                if t.checkpointed < t.step:
                    say(t, f"stopping: steps {t.checkpointed + 1} to {t.step} have no checkpoint and will be repeated")
                return False
            train_step(t, batch, waited_s)
        collect(t, wait=True)
        weights.export(config.run_dir, t.policy, base_model, config.trainer.lora, world)
        if t.lineage:
            t.lineage.finish()
            say(t, f"finished: {t.step} steps, model in {config.run_dir / 'model'}")
        if t.evaluated:
            t.evaluated.wait_for_last(t.version, t.stop.wait)
    return True


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
            aside = checkpoint.set_aside(unusable)
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
    found, ignored = checkpoint.newest(root, lineage.survives)
    if found is None and not from_base:
        lineage.require_no_checkpoint(root, ignored)
    return found, ignored


def weights_folder(t: Trainer, record: StepRecord) -> Path:
    """Where the version that a step makes goes."""
    return t.weights / folder_name(record.version, record.batch.step_id)


def next_batch(t: Trainer) -> tuple[Batch | None, float]:
    """The next step's batch and the seconds waited for it; None when told to stop. Collective."""
    start = time.time()
    while True:
        batch, stopping = None, False
        if t.lineage:
            stopping = t.stop.is_set() or t.lineage.is_stopping()
            if not stopping:
                batch = t.lineage.wait_for_batch(t.step + 1, HEARTBEAT_S, t.stop.wait)
        batch, stopping = t.world.share((batch, stopping))
        if stopping:
            return None, 0.0
        if batch is not None:
            end = time.time()
            if t.lineage:
                t.lineage.record("wait_for_batch", start, end, step=batch.step)
            return batch, end - start


def train_step(t: Trainer, batch: Batch, waited_s: float) -> None:
    """Update on a leased batch, make it durable, record it, publish it. Collective."""
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
    version = t.world.share(t.lineage.next_version() if t.lineage else 0)
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
    if t.lineage:
        record = saved.record
        t.lineage.complete(record, saved.published.path, saved.published.checksum)
        remove_old(t, saved.checkpoint)  # only now: a trainer that was overtaken has no business with them
        t.lineage.record("train_step", start, time.time(), step=batch.step, version=version, updated=updated)
        say(t, line(t, record))
        if t.sinks:
            t.sinks.log(record.step, record.metrics)
        if t.evaluated:
            t.evaluated.tell()
    publish(t, version, saved.published.tensors)
    t.step, t.version = batch.step, version


def on_nonfinite(t: Trainer, step: int, found: NonFinite) -> None:
    """Put it on the timeline, and stop or go on as configured."""
    does = t.config.trainer.nonfinite
    if t.lineage:
        now, named = time.time(), list(found.trajectories)
        t.lineage.record("nonfinite", now, now, step=step, does=does, message=str(found), trajectories=named)
    if does == "stop":
        raise NonFiniteError(f"step {step}: {found} (trainer.nonfinite: skip would leave this out)")
    say(t, f"step {step}: {found}: skipped")


def step_metrics(
    t: Trainer, batch: Batch, samples: Sequence[Sample], update: Metrics, waited_s: float, train_s: float
) -> Metrics:
    """All that is known of a step before it is saved; what only the store knows, on rank 0 alone."""
    peak = peak_flops(t.world.device)
    mfu = {"mfu": update["flops"] / (train_s * peak * t.world.size)} if peak and "flops" in update else {}
    return {
        **update,
        **batch_metrics(batch, samples),
        **(outcome_metrics(batch, t.lineage.facts(batch)) if t.lineage else {}),
        **mfu,
        "tokens_per_s": update["tokens_trained"] / train_s,
        "time/wait_for_batch": waited_s,
        "time/wait_for_policy": t.publish_s,
        "time/train": train_s,
    }


@dataclass(frozen=True, slots=True)
class Saved:
    """A step on disk: its record, the folder that engines load, and the checkpoint, if one was due."""

    record: StepRecord
    published: Published
    checkpoint: Checkpoint | None


def publishable(t: Trainer, folder: Path, trained: dict[str, torch.Tensor]) -> Published:
    """What the run's engines load."""
    dtype = engine_dtype(t.config)
    return weights.publishable(folder, trained, t.base_model, t.policy.names, t.config.trainer.lora, dtype)


def engine_dtype(config: RunConfig) -> torch.dtype:
    """What engines keep matrices in."""
    dtype: torch.dtype = getattr(torch, config.engine.dtype)
    return dtype


def save(t: Trainer, record: StepRecord) -> Saved:
    """Checkpoint when it is due (or the last chance), and write what engines load. Collective.

    With `checkpoint_every: 1` no step is completed before its checkpoint is durable. With more, steps without one are
    trained again after a crash anyway, and a checkpoint is written while the next steps go on.
    """
    start = time.time()
    every = t.config.trainer.checkpoint_every
    if t.lineage:
        t.lineage.check()
    last_chance = t.stop.is_set() or (t.lineage is not None and t.lineage.is_stopping())
    last = t.world.share(last_chance or record.step == t.config.steps)
    due, wait = last or record.step % every == 0, last or every == 1
    record = replace(record, metrics=record.metrics | {CHECKPOINTED: float(due and wait)})
    collect(t, wait=due)
    made: Checkpoint | None = None
    if due:
        everything = parts(t.models, t.optimizer, t.config.trainer)
        writing = checkpoint.begin(t.checkpoints, record, everything, t.world, wait=wait)
        if wait:
            made, t.checkpointed = writing.finish(), record.step
        else:
            t.writing = writing
    trained = weights.trainable(t.policy, t.world)
    if not t.lineage:
        return Saved(record, Published(Path(), "", {}), made)
    published = publishable(t, weights_folder(t, record), trained)
    record = replace(record, metrics=record.metrics | {"time/checkpoint": time.time() - start})
    return Saved(record, published, made)


def collect(t: Trainer, *, wait: bool) -> None:
    """Finish the checkpoint that is being written, if it is ready or is to be waited for; older ones go."""
    if t.writing is None or not (wait or t.writing.done()):
        return
    made, t.writing = t.writing.finish(), None
    t.checkpointed = made.record.step
    if t.lineage:
        t.lineage.checkpointed(made.record)
        checkpoint.remove_older(made, t.config.trainer)


def remove_old(t: Trainer, made: Checkpoint | None) -> None:
    """Delete checkpoints and weights that a completed step makes superfluous."""
    assert t.lineage is not None
    if made:
        checkpoint.remove_older(made, t.config.trainer)
    weights.remove(t.weights, partial(t.lineage.unneeded, strangers=False))


def publish(t: Trainer, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Bring the engines to `version`, which has these tensors. When stopped first, the next start republishes it.

    Collective: the other ranks hear from rank 0 as long as it tries.
    """
    start = time.time()
    if not wait_for_evaluation(t, version):
        return
    if t.lineage is None:
        while t.world.share(None):
            continue
        return
    assert t.publisher is not None
    begun = time.time()
    try:
        done = t.publisher.publish(version, t.lineage.epoch, tensors, partial(t.world.share, WAITING))
    finally:
        t.world.share(None)
    t.publish_s = time.time() - start
    if done:
        t.lineage.record("wait_for_publish", begun, time.time(), version=version)


@contextmanager
def sinks_of(t: Trainer) -> Iterator[None]:
    """Send metrics where they are wanted, beginning with the step that was resumed from: it may not have arrived."""
    if t.lineage is None:
        yield
        return
    t.sinks = Sinks.of(t.config, t.lineage.run_id, max(1, t.step), partial(report_sink, t))
    if t.config.is_evaluated and wanted(t.config.metrics):
        t.evaluated = Evaluated(t.lineage, t.sinks)
    try:
        if t.step:
            t.sinks.log(t.step, t.lineage.metrics(t.step))
        yield
    finally:
        t.sinks.close()


def report_sink(t: Trainer, name: str, error: str) -> None:
    """Say that metrics do not arrive somewhere."""
    assert t.lineage is not None
    now = time.time()
    t.lineage.record("sink_failed", now, now, sink=name, error=error)
    say(t, f"metrics.{name}: {error}; training goes on")


def line(t: Trainer, record: StepRecord) -> str:
    """One step for the reader of the terminal."""
    m = record.metrics
    mismatch = f"{m['logprob_mismatch_mean_abs']:.1e}" if "logprob_mismatch_mean_abs" in m else "-"
    parts = [
        f"step {record.step}/{t.config.steps}  reward {m['reward/mean']:.3f}  loss {m['loss']:+.4f}",
        f"grad {m['grad_norm']:.2f}  entropy {m['entropy']:.3f}  mismatch {mismatch} ({m['mismatch_tokens']:.0f})",
        f"staleness {m['off_policy/mean']:.2f} max {m['off_policy/max']:.0f}",
        f"trained {m['tokens_trained']:.0f} tokens, {m['tokens_per_s']:.0f}/s",
        f"wait {m['time/wait_for_batch']:.1f}s+{m['time/wait_for_policy']:.1f}s train {m['time/train']:.1f}s"
        f" save {m['time/checkpoint']:.1f}s",
    ]
    if m["off_policy/dropped"]:
        parts.append(
            f"{m['off_policy/dropped']:.0f} sampled tokens too old to train: raise trainer.max_staleness "
            "or lower rollout.max_concurrent_groups"
        )
    return "  ".join(parts)


def say(t: Trainer, text: str) -> None:
    """Print on rank 0."""
    if t.world.leads:
        visible.say(text)
