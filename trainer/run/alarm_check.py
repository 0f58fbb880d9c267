"""Alarms, rules on a run's metrics: whether one sounds, and the check of a step's metrics before it is saved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from agentrl.configs.trainer_config import AlarmConfig
from agentrl.errors import did_you_mean
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.run.trainer_state import Trainer, say

Metrics = Mapping[str, float]


def check_alarms(t: Trainer, record: StepRecord) -> None:
    """On rank 0, warn of alarms that begin to sound with this step, and fail the run if one is to stop it. The step is
    then saved with its checkpoint, since the run is ending.
    """
    alarms = t.config.trainer.alarms
    if not alarms or not t.world.leads:
        return
    most = max(alarm.steps for alarm in alarms)
    before = t.lineage.metrics_before(record.step, most)
    first = t.lineage.metrics(1) if record.step > 1 else record.metrics
    _say_unknown(t, record)
    for alarm in alarms:
        if not sounds(alarm, _values(alarm, [*before, record.metrics]), first.get(alarm.metric)):
            continue
        text = message(alarm, record.step, record.metrics[alarm.metric])
        begins = not sounds(alarm, _values(alarm, before), first.get(alarm.metric))
        if begins or alarm.does == "stop":
            now = time.time()
            t.lineage.record("alarm", now, now, step=record.step, metric=alarm.metric, does=alarm.does, message=text)
            say(t, text)
        if alarm.does == "stop":
            t.lineage.fail(f"{text}; to go on, change trainer.alarms and resume")


def _values(alarm: AlarmConfig, steps: Sequence[Metrics]) -> list[float | None]:
    return [metrics.get(alarm.metric) for metrics in steps]


def _say_unknown(t: Trainer, record: StepRecord) -> None:
    """Name the metrics that the first step of this trainer does not have."""
    if t.knows_metrics:
        return
    t.knows_metrics = True
    for alarm in t.config.trainer.alarms:
        if alarm.metric not in record.metrics:
            near = did_you_mean(alarm.metric, record.metrics)
            said = near if near.startswith("; did") else ""
            say(t, f"trainer.alarms: step {record.step} has no metric {alarm.metric!r}{said}")


def sounds(alarm: AlarmConfig, values: Sequence[float | None], first: float | None = None) -> bool:
    """Whether the metric has been beyond its bound in the last `alarm.steps` steps.

    `values` are those of consecutive steps, oldest first, None where a step lacks the metric; `first` is the value of
    the run's first step, to which a bound with `of_first` is relative.
    """
    recent = values[-alarm.steps :]
    return len(recent) == alarm.steps and all(value is not None and _beyond(alarm, value, first) for value in recent)


def _beyond(alarm: AlarmConfig, value: float, first: float | None) -> bool:
    if alarm.of_first and first is None:
        return False
    factor = abs(first) if alarm.of_first and first is not None else 1.0
    if alarm.below is not None:
        return value < alarm.below * factor
    return alarm.above is not None and value > alarm.above * factor


def message(alarm: AlarmConfig, step: int, value: float) -> str:
    """One line that says what has happened."""
    bound = f"below {alarm.below:g}" if alarm.below is not None else f"above {alarm.above:g}"
    relative = " of its first value" if alarm.of_first else ""
    steps = f"{alarm.steps} steps" if alarm.steps > 1 else "1 step"
    return f"alarm at step {step}: {alarm.metric} is {value:.4g}, {bound}{relative} for {steps}"
