"""Rules on a run's metrics: whether an alarm sounds after a step."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.configs.alarm_config import AlarmConfig


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
