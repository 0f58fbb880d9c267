"""The section `evaluation`: held-out tasks, when they are played, and how they are sampled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.configs.section import Positive, Seconds, Section


class EvalSampling(Section):
    """One way to sample in an evaluation, by the name that its results get; null: as the agent asks. The first is the
    main one. Any that are given replace the default two: `sampled` at temperature 1, `greedy` at 0."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Softmax temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(gt=0, le=2**30)] | None = None
    """Sample from the N likeliest tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sample from the tokens that are at least this times as likely as the likeliest."""
    max_tokens: Positive | None = None
    """Upper bound on new tokens of one call; the agent may ask for fewer."""


UNSEEN = "unseen"
"""The setting under which `unseen_tasks` are played."""


class EvalConfig(Section):
    """Held-out evaluation: of the base weights, every few steps, and of the last step ([evaluation](evaluation.md))."""

    tasks: str | None = None
    """JSONL file or `module:function` that yields held-out tasks, played in every setting; null: none."""
    size: Positive = 64
    """The first N tasks are used."""
    unseen_tasks: str | None = None
    """A second task set, with phrasings that training never shows; sampled as the first setting says."""
    samples: Positive = 1
    """Episodes of each task in each setting; a task counts with their mean."""
    every: Positive | None = None
    """Steps between evaluations; null evaluates only before the first step and after the last."""
    hold: bool = False
    """Publish no weights while those that are served are evaluated: then one version samples it, and training waits."""
    hold_timeout_s: Seconds = 3600.0
    """Publish all the same after this long."""
    max_concurrent: Positive = 32
    """Episodes that one worker plays at once."""
    settings: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], EvalSampling], Field(min_length=1)
    ] = Field(
        default_factory=lambda: {"sampled": EvalSampling(temperature=1.0), "greedy": EvalSampling(temperature=0.0)}
    )
    """How episodes are sampled, by name."""

    @model_validator(mode="after")
    def _no_setting_is_called_unseen(self) -> EvalConfig:
        if self.unseen_tasks is not None and UNSEEN in self.settings:
            raise ValueError(f"settings.{UNSEEN}: unseen_tasks are played under that name")
        return self

    @property
    def main_setting(self) -> str:
        """The setting that one figure is taken from."""
        return next(iter(self.settings))
