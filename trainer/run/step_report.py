"""What is reported of a step: metrics, trained trajectories, a line for the terminal, and the metric sinks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from agentrl.domain.schemas import Batch
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.metrics.batch_metrics import Metrics, batch_metrics, outcome_metrics
from agentrl.trainer.metrics.evaluation_metrics import Evaluated
from agentrl.trainer.metrics.flops import peak_flops
from agentrl.trainer.metrics.metric_sinks import Sinks, wanted
from agentrl.trainer.packing import Sample
from agentrl.trainer.run.trainer_state import Trainer, say


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
