"""The section `reward`: functions that score the answers of agents, and the processes that run them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from agentrl.configs.section import NonNegative, Positive, Seconds, Section

ComponentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
SINGLE = "reward"
"""The name of the reward of `reward.function`."""


class RewardComponent(Section):
    """One function of several. Its weighted value is a reward of the component's name; rewards of all names add up."""

    function: str
    """`module:function`, or the name of a [verifier](rewards.md#verifiers)."""
    weight: float = 1.0
    """The function's value is multiplied by this before it is recorded. 0: the value is no reward; it is a number of
    the episode, by the component's name ([numbers](workflows.md#metrics)).
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    batched: bool | None = None
    """Whether one call scores all answers of a group; null: if the function has a parameter `prompts`."""
    timeout_s: Seconds | None = None
    """Timeout of one call; null: `reward.timeout_s`."""


class RewardConfig(Section):
    """How answers are scored ([rewards](rewards.md#functions)): one `function`, or several `components`. A string in
    place of the section is its `function`.
    """

    function: str | None = None
    """`module:function`, or the name of a [verifier](rewards.md#verifiers), when there is one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call of `function`."""
    batched: bool | None = None
    """As `components.NAME.batched`, for `function`."""
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
        if self.function is None and (self.args or self.batched is not None):
            raise ValueError("`args` and `batched` belong to `function`; components have their own")
        if self.components and not any(one.weight for one in self.components.values()):
            raise ValueError("components: one of them needs a `weight` other than 0, or there is no reward")
        return self

    @property
    def functions(self) -> dict[str, RewardComponent]:
        """All components by name; `function` is the component `reward`."""
        if self.function is None:
            return self.components
        return {SINGLE: RewardComponent(function=self.function, args=self.args, batched=self.batched)}
