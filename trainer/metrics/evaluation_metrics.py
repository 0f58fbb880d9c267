"""Sends the result of each complete evaluation to the metric sinks, at the step whose weights were evaluated.

Rollout workers run the evaluations. Only `wait_for_last`, after the last step, waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from agentrl.domain.evaluation import Evaluation
from agentrl.domain.session_stats import EVALUATION
from agentrl.trainer.metrics.batch_metrics import Metrics
from agentrl.trainer.metrics.metric_sinks import Sinks
from agentrl.trainer.run_lineage import Lineage

POLL_S = 1.0
FIGURES = ("reward", "low", "high", "perfect")


@dataclass(slots=True)
class EvaluationReports:
    """The results that sinks have received. A resumed trainer sends the newest two again: they may have been lost."""

    lineage: Lineage
    sinks: Sinks
    enabled: bool = True  # false on ranks other than 0, and where there is no evaluation or no sink
    sent: set[int] = field(default_factory=set)  # weight versions
    open: int | None = None  # the first step whose evaluation has begun and is not complete

    @classmethod
    def none(cls) -> Self:
        """Reports nothing."""
        return cls(Lineage(), Sinks.none(), enabled=False)

    def send(self) -> None:
        """Send the results that became complete since the last call."""
        if not self.enabled:
            return
        evaluations = self.lineage.evaluations(self.open)
        for evaluation in evaluations:
            if evaluation.complete and evaluation.version not in self.sent:
                self.sinks.log(evaluation.step, metrics(evaluation))
                self.sent.add(evaluation.version)
        self.open = next((e.step for e in evaluations if not e.complete), None)

    def wait_for_last(self, version: int, pause: Callable[[float], bool], timeout_s: float) -> None:
        """Wait until the evaluation of the last step's `version` is complete, and send its result.

        Gives up after `timeout_s`, or when `pause` returns true.
        """
        until = time.monotonic() + timeout_s
        self.send()
        while self.enabled and version not in self.sent and time.monotonic() < until and not pause(POLL_S):
            self.send()


def metrics(evaluation: Evaluation) -> Metrics:
    """`evaluation/SETTING/FIGURE` and `evaluation/SETTING/SOURCE/FIGURE`, without the bounds of intervals that are
    unknown. `pass@K`, `best@K`, `maj@K` and `best_of@K` are figures of several samples. What agents measured is
    `eval-rollout/SETTING/NAME`.
    """
    found: Metrics = {}
    for name, result in evaluation.settings.items():
        whole = result.as_json()
        for prefix, of in {name: whole, **{f"{name}/{s}": r for s, r in whole.get("sources", {}).items()}}.items():
            figures = {figure: of[figure] for figure in FIGURES if of[figure] is not None}
            for kind in ("pass", "best", "maj", "best_of"):
                figures |= {f"{kind}@{k}": value for k, value in of.get("samples", {}).get(kind, {}).items()}
            found |= {f"evaluation/{prefix}/{figure}": float(value) for figure, value in figures.items()}
        found |= {f"{EVALUATION}/{name}/{stat}": mean for stat, mean in whole.get("stats", {}).items()}
    return found
