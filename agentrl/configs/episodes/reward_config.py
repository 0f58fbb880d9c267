"""The section `reward`: functions that score the answers of agents, and the processes that run them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.configs.section import NonNegative, Positive, Seconds, Section

Normalize = Literal["none", "running", "running_per_source"]
ComponentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
SINGLE = "reward"
"""The name of the reward of `reward.function`."""
MOST_SHOWN = 16
"""Maximum components of weight 0: a session has at most 32 numbers."""


class FunctionUse(Section):
    """How one function is called, and what is trained of its values."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    batched: bool | None = None
    """Whether one call scores all answers of a group; null: if the function has a parameter `prompts`."""
    per: Literal["session", "call"] = "session"
    """`session`: judges the answer that the agent scores; `call`: judges every main call of the session when the agent
    has ended, and rewards that call ([process rewards](rewards.md#process-rewards)).
    """
    normalize: Normalize = "none"
    """`running`: trains (value − μ) / (σ + 1e-6), with the mean and the deviation of all values that the run has
    trained until this step, its own batch included; `running_per_source`: of those of tasks of the same
    [source](metrics.md). The recorded reward stays as it is.
    """
    clip: tuple[float, float] | None = None
    """The lowest and the highest value that is trained, after `normalize`. The recorded reward stays as it is."""

    @field_validator("clip")
    @classmethod
    def _low_is_below_high(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"must be [low, high] with low below high, got [{value[0]:g}, {value[1]:g}]")
        return value

    @model_validator(mode="after")
    def _calls_are_judged_alone(self) -> FunctionUse:
        if self.batched and self.per == "call":
            raise ValueError("per: call judges every call alone: leave out `batched`")
        return self


class RewardComponent(FunctionUse):
    """One function of several. Its weighted value is a reward of the component's name; rewards of all names add up."""

    function: str
    """`module:function`, or the name of a [verifier](rewards.md#verifiers)."""
    weight: float = 1.0
    """The function's value is multiplied by this before it is recorded. A function of weight 0 gives no reward: its
    value is a [number of the session](rewards.md#functions), `reward/NAME`.
    """
    timeout_s: Seconds | None = None
    """Timeout of one call; null: `reward.timeout_s`."""


class RewardConfig(FunctionUse):
    """How answers are scored ([rewards](rewards.md#functions)): one `function`, or several `components`. A string in
    place of the section is its `function`.
    """

    function: str | None = None
    """`module:function`, or the name of a [verifier](rewards.md#verifiers), when there is one. `args`, `batched`,
    `per`, `normalize` and `clip` are for it.
    """
    components: Annotated[dict[ComponentName, RewardComponent], Field(max_length=64)] = Field(default_factory=dict)
    """Functions by the name of their reward."""
    timeout_s: Seconds = 15.0
    """Timeout of one call of a function. A function that runs longer is ended together with its process."""
    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Further attempts after a call that raised, crashed, timed out, or returned no finite number."""
    on_error: float | None = None
    """The function's value when all attempts failed, recorded with the source `on_error`; null: the session fails."""
    processes: Positive = 4
    """Maximum processes of a rollout worker that run functions. They are started on demand."""
    memory_mb: Positive = 4096
    """A process that holds more memory than this after a call is replaced. An allocation beyond twice this amount
    raises MemoryError in the function.
    """
    recycle_after: NonNegative = 1000
    """Replace a process after this many calls; 0: never."""
    batch_wait_s: Seconds = 60.0
    """How long a batched function waits for the other answers of a group."""

    @model_validator(mode="before")
    @classmethod
    def _a_string_is_the_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _there_is_something_to_call(self) -> RewardConfig:
        if (self.function is None) == (not self.components):
            raise ValueError("give either `function` or `components`")
        unset = FunctionUse()
        given = [name for name in FunctionUse.model_fields if getattr(self, name) != getattr(unset, name)]
        if self.function is None and given:
            raise ValueError(f"`{given[0]}` belongs to `function`; components have their own")
        shown = [name for name, one in self.components.items() if not one.weight]
        if len(shown) > MOST_SHOWN:
            raise ValueError(f"{len(shown)} components have weight 0; at most {MOST_SHOWN} numbers can be shown")
        for name, one in self.components.items():
            if not one.weight and (one.normalize != "none" or one.clip is not None):
                raise ValueError(f"components.{name}: weight 0 trains nothing: leave out `normalize` and `clip`")
        return self

    @property
    def functions(self) -> dict[str, RewardComponent]:
        """All components by name; `function` is the component `reward`."""
        if self.function is None:
            return self.components
        use = {name: getattr(self, name) for name in FunctionUse.model_fields}
        return {SINGLE: RewardComponent(function=self.function, **use)}
