"""The section `trainer.alarms`: rules on the metrics of steps."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.configs.section import Section

Bound = Annotated[float, Field(ge=-1e12, le=1e12)]


class AlarmConfig(Section):
    """A rule on one metric of the steps ([alarms](trainer.md#alarms))."""

    metric: Annotated[str, Field(min_length=1, max_length=200)]
    """Name of the metric, such as `entropy` ([metrics](metrics.md))."""
    below: Bound | None = None
    """The alarm sounds when the metric is less than this; null: use `above`."""
    above: Bound | None = None
    """The alarm sounds when the metric is more than this; null: use `below`."""
    of_first: bool = False
    """The bound is a factor of the metric's size in the run's first step."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of consecutive steps that must be beyond the bound."""
    does: Literal["warn", "stop"] = "warn"
    """`warn`: print and record it; `stop`: also save the step, and fail the run with the reason."""

    @model_validator(mode="after")
    def _there_is_one_bound(self) -> Self:
        if (self.below is None) == (self.above is None):
            raise ValueError(f"the alarm on {self.metric} needs one of below and above")
        return self
