"""The section `rollout`: how agents play training sessions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.configs.section import Positive, Seconds, Section


class SamplingConfig(Section):
    """How training sessions sample. The defaults keep the recorded logprobs exact (no top-p, top-k, penalties)."""

    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Softmax temperature, forced on training sessions so that an agent that asks for 0 still explores; 1 unless given.
    A run that only records (`steps: 0`) samples as its programs ask, unless this is given."""
    max_tokens: Positive | None = None
    """Upper bound on new tokens of one call; the agent may ask for fewer."""


class RolloutConfig(Section):
    """How agents run."""

    group_size: Positive = 8
    """Sessions per task."""
    min_group_size: Positive = 2
    """A group with failed sessions is trained if this many remain."""
    max_concurrent_groups: Positive = 16
    """Groups that may run at once, over all workers."""
    timeout_s: Seconds = 300.0
    """One episode; a slower one fails."""
    max_failures_in_a_row: Positive | None = 256
    """When this many sessions have failed one after another, evaluations' too, the run is stopped as failed, with the
    last error; `agentrl run reopen`, or `agentrl train` again, lets it go on. null: it never is."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """γ in R_i = r_i + γ·R_{i+1} over the calls of a session."""
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _a_group_can_be_large_enough(self) -> RolloutConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is more than group_size {self.group_size}: no group could train"
            )
        return self
