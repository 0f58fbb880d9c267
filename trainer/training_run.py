"""The steps of a run, one method each. The built-in loop (loop.py) and training scripts call the same methods.

    prepare_batch ─► update ─► save ─► publish ─► evaluate
          ▲            │         │        │          └ waits for the result of the version, where one is due
          │            │         │        └ engines load the version
          │            │         └ the store has the step; its checkpoint is durable, or written during the next steps
          │            └ models and optimizer have moved, in memory only
          └────────────────────── next step ──────────┘

A process that dies anywhere resumes at the newest checkpoint: batches that were not saved, and those of later steps,
are leased again, and a version that was saved but not published is published first. All methods are collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from agentrl.configs.run_config import RunConfig
from agentrl.domain import evaluation
from agentrl.domain.evaluation import Evaluation
from agentrl.domain.schemas import TokenFacts, TrainedBatch
from agentrl.errors import NonFiniteError, UserError
from agentrl.trainer.algorithms.user_functions import AdvantageFunction, Functions, LossFunction
from agentrl.trainer.averages.noise_scale import Estimates
from agentrl.trainer.batches.advantage_facts import gather_facts
from agentrl.trainer.batches.leased_batch import LeasedBatch
from agentrl.trainer.batches.share import Share
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.checkpoints.stored_checkpoints import stored_checkpoints, stored_weights
from agentrl.trainer.distributed import World
from agentrl.trainer.learning_rate import critic_rate, policy_rate, set_learning_rate
from agentrl.trainer.metrics.batch_metrics import Metrics, finite
from agentrl.trainer.metrics.engine_gaps import CallGaps
from agentrl.trainer.metrics.fact_collector import FactCollector, chosen
from agentrl.trainer.models.run_models import after_step, make_models
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run import gpu_turn, step_checkpoint
from agentrl.trainer.run.alarm_check import check_alarms
from agentrl.trainer.run.batch_lease import ShouldAccept, next_batch
from agentrl.trainer.run.next_share import read_ahead
from agentrl.trainer.run.publish_step import publish
from agentrl.trainer.run.resume import resume
from agentrl.trainer.run.saved_step import Saved, remove_old, save
from agentrl.trainer.run.step_profile import profiled
from agentrl.trainer.run.step_report import line, log_samples, sinks_of, step_metrics, trained_trajectories
from agentrl.trainer.run.trainer_start import started
from agentrl.trainer.run.trainer_state import Trainer, say
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.scoring import make_share, scored_first
from agentrl.trainer.stop import Stop
from agentrl.trainer.teachers.teaching import Teaching
from agentrl.trainer.update import update_policy
from agentrl.trainer.weights import model_export
from agentrl.trainer.weights.saved_models import SavedModels

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Updated:
    """A step in memory only: its record, facts of its tokens, and the start and end of its update."""

    record: StepRecord
    token_facts: dict[str, TokenFacts]  # by trajectory
    start: float
    end: float


class TrainingRun:
    """A run, from the point of view of its trainer. Made by `opened`."""

    def __init__(self, t: Trainer) -> None:
        self._t = t
        self._leased: tuple[LeasedBatch, float] | None = None  # with the seconds waited for it
        self._updated: Updated | None = None
        self._saved: Saved | None = None
        self.stopped = False  # told to stop: `prepare_batch` returns None from now on

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self._t.config

    @property
    def world(self) -> World:
        """This process among the trainer's ranks."""
        return self._t.world

    @property
    def step(self) -> int:
        """The last step that is published, or was when the run was resumed; 0 before the first."""
        return self._t.step

    @property
    def version(self) -> int:
        """The weight version of that step."""
        return self._t.version

    @property
    def finished(self) -> bool:
        """Whether the run has all of its steps."""
        return self._t.step >= self._t.config.steps

    def prepare_batch(self, should_accept: ShouldAccept | None = None) -> LeasedBatch | None:
        """Wait for the next step's batch: whole groups, within the staleness limit. None when the run has all of its
        steps or is told to stop.

        A group that `should_accept` refuses never trains: its trajectories are `rejected` with the reason, and another
        group takes its place. Raises UserError when the last batch is not published yet.
        """
        if self._leased or self._updated or self._saved:
            raise UserError(f"prepare_batch: step {self._t.step + 1} is not finished: {self._missing()} it first")
        if self.finished or self.stopped:
            return None
        batch, waited_s = next_batch(self._t, should_accept)
        if batch is None or not gpu_turn.take(self._t):
            self.stopped = True
            return None
        self._leased = batch, waited_s
        return batch

    def update(
        self, batch: LeasedBatch, *, loss: LossFunction | None = None, advantage: AdvantageFunction | None = None
    ) -> Metrics:
        """Train on the batch of `prepare_batch`; returns the step's metrics. Nothing is durable before `save`.

        `loss` and `advantage` replace the run's, for this step. Raises UserError for another batch than the last.
        """
        if self._leased is None or self._leased[0] is not batch:
            raise UserError("update: give the batch of the last prepare_batch, once")
        t, start, (_, waited_s) = self._t, time.time(), self._leased
        config = t.config.trainer
        if advantage is not None and scored_first(config.algorithm):
            raise UserError("update: advantage cannot be used with estimator gae or kl: reward")
        functions = Functions(loss=loss or t.functions.loss, advantage=advantage or t.functions.advantage)
        times = StepTimes(t.world.device, waited_s)
        with profiled(t, batch.step):
            share, metrics, facts, gaps = learn(t, batch, functions, times)
        updated = time.time()
        times.train_s = updated - start
        advantages = gather_facts(share, len(batch.outlines), t.world)
        record = StepRecord(
            step=batch.step,
            version=t.world.share(t.lineage.next_version()),
            batch=TrainedBatch(
                step_id=batch.step_id,
                digest=batch.digest(t.world),
                estimator=config.algorithm.preset,
                wasted_tokens=batch.outline.wasted_tokens,
                trained=trained_trajectories(batch.outline, advantages),
            ),
            metrics=finite(step_metrics(t, batch, share, advantages, metrics, times, gaps.gathered(t.world))),
        )
        check_alarms(t, record)
        self._leased, self._updated = None, Updated(record, facts.gathered(t.world), start, updated)
        return dict(record.metrics)

    def save(self) -> None:
        """Write the step's checkpoint, if one is due, and its weights, and record the step: from now on it is trained.

        A death before this repeats the step from the same batch. Raises UserError without an update.
        """
        if self._updated is None:
            raise UserError("save: there is no update that is not saved")
        t, done = self._t, self._updated
        if done.token_facts:
            t.lineage.keep_token_facts(done.record.batch.step_id, done.token_facts)
        saved = save(t, done.record)
        t.lineage.complete(saved.record, saved.published.path, saved.published.checksum)
        remove_old(t, saved.checkpoint)  # after `complete`, which raises in an overtaken trainer
        gpu_turn.give(t)
        step, version = done.record.step, done.record.version
        t.lineage.record("train_step", done.start, time.time(), step=step, version=version, updated=done.end)
        say(t, line(t, saved.record))
        t.sinks.log(saved.record.step, saved.record.metrics)
        log_samples(t, saved.record)
        t.evaluations.send()
        self._updated, self._saved = None, saved

    def publish(self) -> None:
        """Bring the engines to the saved step's version; `save` first where it was not called. The next step may begin.

        Told to stop meanwhile, it returns; the next start publishes the version.
        """
        if self._updated is not None:
            self.save()
        if self._saved is None:
            raise UserError("publish: there is no step that is not published")
        t, saved, self._saved = self._t, self._saved, None
        publish(t, saved.record.version, saved.published)
        t.step, t.version = saved.record.step, saved.record.version

    def evaluate(self, timeout_s: float | None = None) -> Evaluation | None:
        """The evaluation of the published version, once all of its episodes have ended. None where none is due
        (`evaluation.every`), when told to stop, and after `timeout_s` (null: `evaluation.hold_timeout_s`).

        Rollout workers run evaluations by themselves, as soon as the version is served.
        """
        t, settings = self._t, self._t.config.evaluation
        if not t.config.is_evaluated or t.step not in evaluation.schedule(settings.every, t.config.steps):
            return None
        until = time.monotonic() + (settings.hold_timeout_s if timeout_s is None else timeout_s)
        while True:
            found = [one for one in t.lineage.evaluations(t.step) if one.version == t.version and one.complete]
            waiting = not found and time.monotonic() < until
            again = waiting and not t.stop.wait(POLL_S) and not t.lineage.is_stopping()
            result, again = t.world.share((found[0] if found else None, again))
            if not again:
                return result if isinstance(result, Evaluation) else None

    def _missing(self) -> str:
        return "update" if self._leased else "save and publish" if self._updated else "publish"


@contextmanager
def opened(
    config: RunConfig,
    base_model: Path,
    world: World,
    lineage: Lineage,
    publisher: Publisher | None,
    stop: Stop,
    *,
    from_base: bool = False,
) -> Iterator[TrainingRun]:
    """Load and resume a run; when the block ends, finish a run that has all of its steps. Collective.

    Raises FencedError when a newer trainer has started, and UserError when a run that had checkpoints has none that can
    be used. With `from_base` such a run is rolled back instead, and trained again from the base weights.
    """
    torch.manual_seed(config.seed)
    config = started(config, base_model, world, lineage)
    models = make_models(base_model, config.trainer, world)
    optimizer = make_optimizer(models.policy, config.trainer)
    functions = Functions.of(config.trainer.algorithm)
    t = Trainer(config, base_model, world, models, optimizer, lineage, publisher, stop, from_base, functions)
    if config.trainer.teacher is not None:
        t.teaching = Teaching(config, base_model, world, lineage)
    if world.leads:
        t.stored, t.stored_weights = stored_checkpoints(config), stored_weights(config)
        if (every := config.trainer.save_every) is not None:
            adapter, keep = config.trainer.lora, config.trainer.keep_models
            t.saved_models = SavedModels(config.name, config.run_dir, base_model, adapter, every, keep)
    if t.policy.unpacked:
        say(t, f"every sequence is computed by itself, which is slower: {t.policy.unpacked}")
    resume(t)
    run = TrainingRun(t)
    with sinks_of(t), closing(t):
        yield run
        step_checkpoint.finish_all(t)
        if not run.finished:
            if t.checkpointed < t.step:
                say(t, f"stopping: steps {t.checkpointed + 1} to {t.step} have no checkpoint and will be repeated")
            return
        model_export.export(config.run_dir, t.policy, base_model, config.trainer.lora, world)
        t.lineage.finish()
        say(t, f"finished: {t.step} steps, model in {config.run_dir / 'model'}")
        t.evaluations.wait_for_last(t.version, t.stop.wait, config.evaluation.hold_timeout_s)


@contextmanager
def closing(t: Trainer) -> Iterator[None]:
    """Stop this rank's threads when the block ends, also within a step."""
    try:
        yield
    finally:
        gpu_turn.stop(t)
        if t.ahead is not None:
            t.ahead.stop()


def learn(
    t: Trainer, batch: LeasedBatch, functions: Functions, times: StepTimes
) -> tuple[Share, Metrics, FactCollector, CallGaps]:
    """Update the models from a batch; returns this rank's share with advantages, the metrics of the update, and, of
    this rank, the facts of tokens and the gaps of calls. Collective.
    """
    config = t.config.trainer.model_copy(update={"algorithm": t.models.algorithm(t.config.trainer.algorithm)})
    lessons = None if t.teaching is None else t.teaching.lessons(batch.outline)
    share = make_share(
        batch.outlines,
        batch.read,
        config.algorithm,
        t.models,
        config.token_budget,
        config.minibatches,
        t.world,
        functions.advantage,
        times,
        lessons,
    )
    t.ahead = t.ahead or read_ahead(t)
    t.ahead.start()
    noise, measured = t.models.noise, None if t.models.noise is None else Estimates()
    lr = policy_rate(batch.step, t.config.steps, config)
    if noise is not None and config.noise_scale is not None:
        lr *= noise.factor(config.noise_scale.reference_batch, config.noise_scale.power)
    set_learning_rate(t.optimizer, lr)
    if t.models.critic:
        set_learning_rate(t.models.critic.optimizer, critic_rate(batch.step, t.config.steps, config))
    chosen_ids = chosen(batch.outline, config.token_facts)
    facts = FactCollector(chosen_ids, config.algorithm, own_loss=functions.loss is not None)
    gaps = CallGaps()
    metrics = update_policy(
        t.policy,
        t.optimizer,
        share,
        batch.version,
        batch.ages,
        config,
        t.world,
        t.models.critic,
        partial(on_nonfinite, t, batch.step),
        functions.loss,
        facts,
        times,
        gaps,
        only_critic=batch.step <= config.critic_warmup_steps,
        teachers=t.models.teachers,
        noise=measured,
    )
    if noise is not None and measured is not None:
        noise.add(measured)
        metrics |= {} if noise.value is None else {"noise_scale": noise.value}
    if batch.step > config.critic_warmup_steps:
        after_step(t.models, batch.step, config, metrics)
    controlled = {} if t.models.kl_coef is None else {"kl_coef": config.algorithm.kl_coef}
    return share, metrics | controlled | {"lr": lr}, facts, gaps


def on_nonfinite(t: Trainer, step: int, found: NonFinite) -> None:
    """Record the finding on the timeline. Raise NonFiniteError, or return to skip the minibatch, as configured."""
    action = t.config.trainer.nonfinite
    now, named = time.time(), list(found.trajectories)
    t.lineage.record("nonfinite", now, now, step=step, does=action, message=str(found), trajectories=named)
    if action == "stop":
        raise NonFiniteError(f"step {step}: {found} (trainer.nonfinite: skip would leave this out)")
    say(t, f"step {step}: {found}: skipped")
