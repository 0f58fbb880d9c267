"""The section `rollout`: how agents run training sessions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.configs.section import NonNegative, Positive, Seconds, Section

MOST_SESSIONS = 1024
"""Sessions of a group."""
Share = Annotated[float, Field(ge=0, le=1)]


class SamplingConfig(Section):
    """Sampling of training sessions. The defaults keep the recorded logprobs exact (no top-p, top-k or penalties)."""

    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Softmax temperature of training sessions, which overrides the agent's, so that every agent explores; null: 1. A
    run that only records (`steps: 0`) uses the programs' temperature, unless this is set.
    """
    max_tokens: Positive | None = None
    """Upper bound on the new tokens of a call; the agent may request fewer."""


class CurriculumConfig(Section):
    """Tasks that the policy always or never solves are drawn less often, from the second pass over the tasks on
    ([curriculum](tasks.md#curriculum)).
    """

    target: tuple[Share, Share] = (0.05, 0.95)
    """Least and largest success rate of the tasks that every pass draws."""
    skip: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Probability that a pass skips a task outside `target`. It is less than 1: only the groups of a task show that it
    has changed.
    """
    success: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least reward of an episode that succeeds."""
    groups: Annotated[int, Field(ge=1, le=64)] = 2
    """How many of a task's last groups count; fewer, where it has had fewer."""

    @model_validator(mode="after")
    def _the_target_is_a_range(self) -> CurriculumConfig:
        if self.target[0] > self.target[1]:
            raise ValueError(f"target: {self.target[0]:g} is larger than {self.target[1]:g}")
        return self


class AdaptiveGroupConfig(Section):
    """The number of sessions of a task's next group follows from its success rate ([sizes of
    groups](tasks.md#sizes-of-groups)). Outside programs that name a group choose its size themselves.
    """

    least: Annotated[int, Field(ge=2, le=MOST_SESSIONS)] = 4
    """Fewest sessions of a group."""
    most: Annotated[int, Field(ge=2, le=MOST_SESSIONS)] = 16
    """Most sessions of a group."""
    chance: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Wanted chance that a group has both a success and a failure."""
    success: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least reward of an episode that succeeds."""
    groups: Annotated[int, Field(ge=1, le=64)] = 2
    """How many of a task's last groups count; fewer, where it has had fewer."""

    @model_validator(mode="after")
    def _the_sizes_are_a_range(self) -> AdaptiveGroupConfig:
        if self.least > self.most:
            raise ValueError(f"least: {self.least} is larger than most: {self.most}")
        return self


class ReplayConfig(Section):
    """Groups in which few episodes succeeded are trained once more by later steps, as long as their tokens are within
    `trainer.max_staleness` ([replays](trainer.md#replays)).
    """

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Largest share of successful episodes of a group that is trained again; groups without success never are."""
    times: Annotated[int, Field(ge=1, le=64)] = 1
    """How often a group is trained again at most."""
    groups_per_step: Positive = 1
    """Most groups that a step trains again, beside the `trainer.groups_per_step` new ones."""
    success: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least reward of an episode that succeeds."""


class RolloutConfig(Section):
    """How agents run."""

    group_size: Positive = 8
    """Sessions per task; with `adaptive_group`, of a task without a success rate."""
    adaptive_group: AdaptiveGroupConfig | None = None
    """How the number of sessions follows from a task's success rate; null: it is `group_size`."""
    min_group_size: Positive = 2
    """Train a group with failed sessions if at least this many sessions remain."""
    max_concurrent_groups: Positive = 16
    """Maximum running groups, over all workers."""
    timeout_s: Seconds = 300.0
    """Timeout of an episode; a slower episode fails."""
    processes: NonNegative = 0
    """Processes of a worker that run agents ([agents in processes](sessions.md#agents-in-processes)); 0: agents run in
    the worker's own process, which is fastest if they neither block nor compute.
    """
    process_memory_mb: Positive = 4096
    """A process that runs agents and holds more memory than this after an episode is replaced."""
    max_failures_in_a_row: Positive | None = 256
    """Fail the run after this many consecutive failed sessions, evaluation included, or failed greedy episodes, with
    the last error; `agentrl run reopen` or `agentrl train` resumes it. null: never.
    """
    accept: str | None = None
    """`module:function` called with the task and the rewards of a group's episodes, which returns whether the group
    trains, or the reason why not ([filters](algorithms.md#filters)); null: all groups train.
    """
    curriculum: CurriculumConfig | None = None
    """How tasks that the policy always or never solves are drawn less often; null: every pass draws all tasks."""
    replay: ReplayConfig | None = None
    """How groups with a rare success are trained more than once; null: each trajectory is trained exactly once."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """γ in R_i = r_i + γ·R_{i+1} over the calls of a session."""
    dump_to_file: bool = False
    """`agentrl train` writes each ended group as text to `rollout/` and `eval-rollout/` of the run's folder
    ([trajectories as text](data.md#trajectories-as-text)).
    """
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """How many of the likeliest tokens the engine reports for each token that a training session samples, kept with the
    call ([facts of single tokens](data.md#facts-of-single-tokens)); 0: none. Agents see only those that they ask for.
    """
    sampling: SamplingConfig = SamplingConfig()

    @property
    def least_group_size(self) -> int:
        """The fewest sessions that a group starts with."""
        return self.group_size if self.adaptive_group is None else self.adaptive_group.least

    @model_validator(mode="after")
    def _a_group_can_be_large_enough(self) -> RolloutConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size {self.min_group_size} is larger than group_size {self.group_size}")
        sizes = self.adaptive_group
        if sizes is not None and not sizes.least <= self.group_size <= sizes.most:
            raise ValueError(
                f"group_size {self.group_size} is not within adaptive_group, which has {sizes.least} to {sizes.most}"
            )
        if sizes is not None and self.min_group_size > sizes.least:
            raise ValueError(
                f"min_group_size {self.min_group_size} is larger than adaptive_group.least {sizes.least}: such groups "
                "would never train"
            )
        return self
