"""The section `evaluation`: held-out tasks, the schedule of evaluations, and their sampling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.configs.episodes.task_sources import EvalTasks
from agentrl.configs.section import Positive, Seconds, Section


class EvalSampling(Section):
    """The sampling of one evaluation setting; null: as the agent requests. The first setting is the main one. Settings
    in the config replace the two defaults: `sampled` at temperature 1, `greedy` at 0.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Softmax temperature; 0: take the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Field(gt=0, le=2**30)] | None = None
    """Sample from the N most likely tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sample from tokens whose probability is at least this fraction of the highest."""
    max_tokens: Positive | None = None
    """Upper bound on the new tokens of a call; the agent may request fewer."""


class BestOfConfig(Section):
    """A figure of choosing among a task's samples by a score: `best_of@k` ([several
    samples](evaluation.md#several-samples)). Needs `samples` of at least 2.
    """

    by: Annotated[str, Field(min_length=1, max_length=100)]
    """What scores the samples: the name of a reward (a component of `reward`; `NAME` includes `NAME.KEY`), or of a
    number that episodes [measure](workflows.md#metrics), such as a component with `weight: 0`.
    """
    rewards: Annotated[list[str], Field(min_length=1, max_length=64)] | None = None
    """The names of the rewards that make up the true reward of a sample; null: all rewards but `by`."""

    @model_validator(mode="after")
    def _the_score_is_not_the_truth(self) -> BestOfConfig:
        if self.rewards is not None and self.by in self.rewards:
            raise ValueError(f"rewards: {self.by!r} is the score to choose by; name the rewards that judge the choice")
        return self


UNSEEN = "unseen"
"""The setting of `unseen_tasks`."""


class EvalConfig(Section):
    """Held-out evaluation: of the base weights, every few steps, after the last step ([evaluation](evaluation.md))."""

    tasks: EvalTasks | None = None
    """Held-out tasks, used in every setting: sources as in `tasks`, reported apart; null: none."""
    size: Positive = 64
    """Number of tasks to use, from the start of each source."""
    unseen_tasks: EvalTasks | None = None
    """A second held-out task set, for example with new phrasings; sampled as in the first setting."""
    samples: Positive = 1
    """Episodes per task and setting; a task's result is their mean."""
    best_of: BestOfConfig | None = None
    """Report the true reward of the sample that a score chooses among k; null: it is not reported."""
    every: Positive | None = None
    """Steps between evaluations; null: evaluate before the first step and after the last only."""
    hold: bool = False
    """Publish no weights while an evaluation runs. One version then samples the whole evaluation, and
    training waits.
    """
    hold_timeout_s: Seconds = 3600.0
    """Publish anyway after this time."""
    max_concurrent: Positive = 32
    """Maximum number of concurrent evaluation episodes per worker."""
    settings: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], EvalSampling], Field(min_length=1)
    ] = Field(
        default_factory=lambda: {"sampled": EvalSampling(temperature=1.0), "greedy": EvalSampling(temperature=0.0)}
    )
    """Sampling settings by name."""

    @model_validator(mode="after")
    def _no_setting_is_called_unseen(self) -> EvalConfig:
        if self.unseen_tasks is not None and UNSEEN in self.settings:
            raise ValueError(f"settings.{UNSEEN}: the name is reserved for unseen_tasks")
        return self

    @model_validator(mode="after")
    def _there_is_a_choice(self) -> EvalConfig:
        if self.best_of is not None and self.samples < 2:
            raise ValueError("best_of: chooses among a task's samples: set samples to at least 2")
        return self

    @property
    def main_setting(self) -> str:
        """The first setting; its reward is reported as the result of the evaluation."""
        return next(iter(self.settings))
