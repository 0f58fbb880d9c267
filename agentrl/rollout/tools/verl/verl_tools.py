"""verl's tools as sources: `create` begins an episode, `execute` runs calls, `calc_reward` and `release` end it.

verl's own loop creates and releases a tool for each call; here the tool lives as long as the episode, so that it can
keep a state and be rewarded for it.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.tools.tool_result import OpenTool, OpenTools, ToolBroken, ToolContext, ToolResult
from agentrl.rollout.tools.verl.base_tool import BaseTool
from agentrl.rollout.tools.verl.openai_schemas import OpenAIFunctionToolSchema

KEYS = ("class_name", "config", "tool_schema")
"""The keys of an entry, as in verl's file of tools."""


class VerlTool:
    """The source of a tool."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        schema = tool.tool_schema or tool.get_openai_tool_schema()
        self._schema: Json = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.name: str = self._schema["function"]["name"]

    async def open(self, context: ToolContext) -> OpenTools:
        """Create the tool's state of an episode."""
        tool, kwargs = self._tool, partial(context.kwargs_of, self.name)
        create_kwargs = kwargs("create_kwargs")
        created = await tool.create(
            str(uuid.uuid4()), **create_kwargs, **_taken(tool.create, {"create_kwargs": create_kwargs})
        )
        instance_id = created[0] if isinstance(created, tuple) else created
        own_reward = getattr(type(tool), "calc_reward", BaseTool.calc_reward).__module__ != BaseTool.__module__
        about = SimpleNamespace(
            request_id=context.episode_id,
            messages=context.messages,
            tools_kwargs=context.task.get("tools_kwargs") or {},
            extra_fields={},
        )

        async def call(arguments: Json, _: ToolContext) -> ToolResult:
            more = _taken(tool.execute, {"agent_data": about})
            return _result(await tool.execute(instance_id, arguments, **{**more, **kwargs("execute_kwargs")}))

        async def reward() -> float | None:
            return _number(await tool.calc_reward(instance_id, **kwargs("calc_reward_kwargs")))

        return OpenTools(
            name=self.name,
            tools=[OpenTool(name=self.name, schema=self._schema, call=call)],
            reward=reward if own_reward else None,
            release=partial(tool.release, instance_id, **kwargs("release_kwargs")),
        )


def is_verl_tool(found: object) -> bool:
    """Whether it is a class of verl's tools, or an object of one."""
    methods = ("get_openai_tool_schema", "create", "execute", "release")
    return all(callable(getattr(found, name, None)) for name in methods)


def verl_tool(found: Any, at: str, config: Mapping[str, Any] | None = None, schema: Json | None = None) -> VerlTool:
    """The source for a class or an object. Raises UserError."""
    if not inspect.isclass(found):
        return VerlTool(found)
    try:
        given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{at}.tool_schema.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    make: Any = found
    return VerlTool(make(config=dict(config or {}), tool_schema=given))


def _taken(function: Callable[..., Any], keywords: Json) -> Json:
    """Those of the keyword arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in keywords.items() if takes_all or name in parameters}


def _result(found: Any) -> ToolResult:
    """What `execute` returned: the answer, or the answer, a reward and metrics."""
    answer, reward = (found[0], found[1]) if isinstance(found, tuple) else (found, None)
    if answer is None or isinstance(answer, str):
        return ToolResult(text=answer or "", reward=reward)
    counted = {"image": getattr(answer, "image", None), "video": getattr(answer, "video", None)}
    parts = [getattr(answer, "text", None) or "", *(f"[{len(many)} {kind}]" for kind, many in counted.items() if many)]
    return ToolResult(text="\n".join(filter(None, parts)), reward=reward)


def _number(found: Any) -> float | None:
    """The reward of an episode: a number, or the sum of a list of numbers. Raises ToolBroken."""
    if isinstance(found, list):
        if not all(isinstance(one, int | float) for one in found):
            raise ToolBroken(f"calc_reward must return a number, got {found!r:.100}")
        return float(sum(found))
    return found  # type: ignore[no-any-return]  # the toolbox checks it
