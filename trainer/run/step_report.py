"""Reports a step: its metrics, its trained trajectories, a line for the terminal, and the metric sinks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.experts.routed_experts import RouteOrigin
from agentrl.domain.schemas import TrainedTrajectory
from agentrl.trainer.batches.advantage_facts import AdvantageFacts
from agentrl.trainer.batches.leased_batch import LeasedBatch
from agentrl.trainer.batches.share import Share
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.metrics.batch_metrics import (
    Metrics,
    batch_metrics,
    origins_read,
    outcome_metrics,
    routing_metrics,
)
from agentrl.trainer.metrics.engine_gaps import CallGaps, engine_metrics
from agentrl.trainer.metrics.evaluation_metrics import EvaluationReports
from agentrl.trainer.metrics.flops import peak_flops
from agentrl.trainer.metrics.metric_sinks import Sinks, wanted
from agentrl.trainer.metrics.sample_tables import table_of
from agentrl.trainer.run import over_budget
from agentrl.trainer.run.trainer_state import Trainer, say


def step_metrics(
    t: Trainer,
    batch: LeasedBatch,
    share: Share,
    advantages: AdvantageFacts,
    update: Metrics,
    times: StepTimes,
    gaps: CallGaps,
) -> Metrics:
    """The metrics of a step before it is saved. Only rank 0 has those from the store. Collective."""
    peak = peak_flops(t.world.device)
    train_s = times.train_s
    facts = t.lineage.facts(batch.outline)
    mfu = {"mfu": update["flops"] / (train_s * peak * t.world.size)} if peak and "flops" in update else {}
    return {
        **update,
        **batch_metrics(batch.outline, advantages),
        **(_routing(t, share) if t.config.trainer.routing_replay == "engine" else {}),
        **outcome_metrics(batch.outline, facts),
        **engine_metrics(gaps, batch.outline.trajectories, facts.engines),
        **mfu,
        "over_budget_trajectories": over_budget.report(t, batch.outlines),
        "tokens_per_s": update["tokens_trained"] / train_s,
        "time/wait_for_policy": t.publish_s,
        **times.metrics(),
    }


def _routing(t: Trainer, share: Share) -> Metrics:
    counts = t.world.total(origins_read(s.tokens for s in share.samples))
    return routing_metrics({origin: counts[origin.name] for origin in RouteOrigin})


@contextmanager
def sinks_of(t: Trainer) -> Iterator[None]:
    """Open the metric sinks on rank 0 until the block ends.

    Logs first the step that was resumed from, since its metrics may not have arrived.
    """
    if t.world.leads:
        t.sinks = Sinks.of(t.config, t.lineage.run_id, max(1, t.step), partial(report_sink, t))
        enabled = t.config.is_evaluated and bool(wanted(t.config.metrics))
        t.evaluations = EvaluationReports(t.lineage, t.sinks, enabled)
    try:
        if t.step:
            t.sinks.log(t.step, t.lineage.metrics(t.step))
        yield
    finally:
        t.sinks.close()


def log_samples(t: Trainer, record: StepRecord) -> None:
    """Send a table of the step's rollouts to the sinks, in every N-th step, where the run asks for it."""
    wanted_samples = t.config.metrics.samples
    if t.world.leads and wanted_samples is not None and record.step % wanted_samples.every == 0:
        found = t.lineage.samples(record.batch.step_id, wanted_samples.count)
        if found:
            t.sinks.log(record.step, table_of(record.step, found, wanted_samples.max_text_bytes))


def report_sink(t: Trainer, name: str, error: str) -> None:
    """Record and print that a sink has failed."""
    now = time.time()
    t.lineage.record("sink_failed", now, now, sink=name, error=error)
    say(t, f"metrics.{name}: {error}; training goes on")


def line(t: Trainer, record: StepRecord) -> str:
    """One step as a line for the terminal."""
    m = record.metrics
    mismatch = f"{m['logprob_mismatch_mean_abs']:.1e}" if "logprob_mismatch_mean_abs" in m else "-"
    grad = f"grad {m['grad_norm']:.2f}" if "grad_norm" in m else f"critic only, grad {m['value_grad_norm']:.2f}"
    parts = [
        f"step {record.step}/{t.config.steps}  reward {m['reward/mean']:.3f}  loss {m['loss']:+.4f}",
        f"{grad}  entropy {m['entropy']:.3f}  mismatch {mismatch} ({m['mismatch_tokens']:.0f})",
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


def trained_trajectories(batch: BatchOutline, advantages: AdvantageFacts) -> list[TrainedTrajectory]:
    """The advantage, staleness and loss tokens of each trajectory that has loss tokens."""
    trained = []
    for one, advantage in zip(batch.trajectories, advantages.means.tolist(), strict=True):
        if not len(one.trained):
            continue
        ages = [(batch.ages[version], end - start) for _, version, start, end in one.trained.tolist()]
        tokens = one.loss_tokens
        trained.append(
            TrainedTrajectory(
                trajectory_id=one.trajectory_id,
                advantage=float(np.nan_to_num(advantage)),  # NaN: the minibatch was skipped
                staleness_max=max(age for age, _ in ages),
                staleness_mean=sum(age * count for age, count in ages) / tokens,
                tokens_trained=tokens,
            )
        )
    return trained
