"""The base class of verl's tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import UserError
from agentrl.rollout.tools.verl.openai_schemas import OpenAIFunctionToolSchema, ToolResponse

Function = TypeVar("Function", bound=Callable[..., Any])


class BaseTool:
    """A tool. One object serves all episodes of a process at the same time; `instance_id` says which one is meant.

    The keyword arguments are the task's: `tools_kwargs.NAME.create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and
    `release_kwargs`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise UserError(f"{type(self).__name__} has no schema: give `tool_schema`, or get_openai_tool_schema()")
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The schema that the model reads."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode. Returns the id that the other methods get."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Run a call. Returns the answer, the reward of this step, and metrics, which are not used."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the episode. It is asked only where a class has a method of its own."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode."""


def rollout_trace_op(function: Function) -> Function:
    """The function itself: every model call and every reward is recorded anyway."""
    return function
