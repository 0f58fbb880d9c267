"""Results of evaluations on their way to the sinks: each when it is complete, at the step whose weights it is of.

Rollout workers evaluate; nothing here waits for them but `wait_for_last`, behind the last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.domain.evaluation import Evaluation
from agentrl.store import evaluation_episodes, runs
from agentrl.trainer.lineage import Lineage
from agentrl.trainer.metrics.batch_metrics import Metrics
from agentrl.trainer.metrics.metric_sinks import Sinks

POLL_S = 1.0
FIGURES = ("reward", "low", "high", "perfect")


@dataclass(slots=True)
class Evaluated:
    """What the sinks have got. A resumed trainer sends the newest two again: they may not have arrived."""

    lineage: Lineage
    sinks: Sinks
    told: set[int] = field(default_factory=set)  # versions
    open: int | None = None  # the first step whose evaluation has begun and is not over

    def tell(self) -> None:
        """Send what is new."""
        run = self.lineage.database.query(runs.get, self.lineage.run_id)
        found = self.lineage.database.query(evaluation_episodes.newest, run, self.open)
        for one in found:
            if one.complete and one.version not in self.told:
                self.sinks.log(one.step, metrics(one))
                self.told.add(one.version)
        self.open = next((one.step for one in found if not one.complete), None)

    def wait_for_last(self, version: int, pause: Callable[[float], bool]) -> None:
        """Send that of the last step's `version`, when it is complete.

        Returns without it after `evaluation.hold_timeout_s`, or when `pause` says that waiting should end.
        """
        until = time.monotonic() + self.lineage.config.evaluation.hold_timeout_s
        self.tell()
        while version not in self.told and time.monotonic() < until and not pause(POLL_S):
            self.tell()


def metrics(one: Evaluation) -> Metrics:
    """`evaluation/SETTING/FIGURE`; an interval that is not known is left out."""
    found = {name: result.as_json() for name, result in one.settings.items()}
    return {
        f"evaluation/{name}/{figure}": float(of_setting[figure])
        for name, of_setting in found.items()
        for figure in FIGURES
        if of_setting[figure] is not None
    }
