"""Checks the run's alarms when a step has its metrics, before it is saved. Rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from agentrl.configs.alarm_config import AlarmConfig
from agentrl.domain.alarms import message, sounds
from agentrl.errors import did_you_mean
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.run.trainer_state import Trainer, say

Metrics = Mapping[str, float]


def check_alarms(t: Trainer, record: StepRecord) -> None:
    """Warn of alarms that begin to sound with this step; fail the run if one is to stop it. The step is then saved with
    its checkpoint, since the run is ending.
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
