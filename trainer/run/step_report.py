"""Reports a step: its metrics, its trained trajectories, a line for the terminal, and the metric sinks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from agentrl.domain.schemas import Batch, TrainedTrajectory
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.metrics.batch_metrics import Metrics, batch_metrics, outcome_metrics, routing_metrics
from agentrl.trainer.metrics.evaluation_metrics import EvaluationReports
from agentrl.trainer.metrics.flops import peak_flops
from agentrl.trainer.metrics.metric_sinks import Sinks, wanted
from agentrl.trainer.metrics.sample_tables import table_of
from agentrl.trainer.packing import Sample
from agentrl.trainer.run import over_budget
from agentrl.trainer.run.trainer_state import Trainer, say


def step_metrics(
    t: Trainer, batch: Batch, samples: Sequence[Sample], update: Metrics, waited_s: float, train_s: float
) -> Metrics:
    """The metrics of a step before it is saved. Only rank 0 has those from the store."""
    peak = peak_flops(t.world.device)
    mfu = {"mfu": update["flops"] / (train_s * peak * t.world.size)} if peak and "flops" in update else {}
    return {
        **update,
        **batch_metrics(batch, samples),
        **(routing_metrics(batch) if t.config.trainer.routing_replay == "engine" else {}),
        **outcome_metrics(batch, t.lineage.facts(batch)),
        **mfu,
        "over_budget_trajectories": over_budget.report(t, batch.trajectories),
        "tokens_per_s": update["tokens_trained"] / train_s,
        "time/wait_for_batch": waited_s,
        "time/wait_for_policy": t.publish_s,
        "time/train": train_s,
    }


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


def trained_trajectories(batch: Batch, samples: Sequence[Sample]) -> list[TrainedTrajectory]:
    """The advantage, staleness and loss tokens of each trajectory that has loss tokens."""
    trained = []
    for sample in samples:
        mask = sample.tokens.loss_mask
        if mask.any():
            ages = np.array([batch.ages[version] for version in sample.tokens.versions[mask].tolist()])
            trained.append(
                TrainedTrajectory(
                    trajectory_id=sample.tokens.trajectory_id,
                    advantage=float(np.nan_to_num(sample.advantages[mask].mean())),  # NaN: the minibatch was skipped
                    staleness_max=int(ages.max()),
                    staleness_mean=float(ages.mean()),
                    tokens_trained=int(mask.sum()),
                )
            )
    return trained
