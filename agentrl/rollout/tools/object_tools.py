"""Objects whose `@tool` methods are tools with a common state: one object for each episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.errors import UserError
from agentrl.rollout.tools.blocking_call import in_thread
from agentrl.rollout.tools.function_tool import FunctionTool
from agentrl.rollout.tools.tool_result import OpenTools, ToolContext


class ObjectTools:
    """A source of the methods of `cls(**args)`, a new object for each episode; or of an object that belongs to one.

    The class may have, plain or async: `create(task, **create_kwargs)`, `calc_reward(**calc_reward_kwargs)` and
    `release(**release_kwargs)`. Methods that are not async run one at a time, in the order of the calls.
    """

    def __init__(self, made_by: Callable[..., object], name: str, args: Mapping[str, Any] | None = None) -> None:
        self._make, self.name, self._args = made_by, name, dict(args or {})

    @classmethod
    def of(cls, found: object, args: Mapping[str, Any] | None = None) -> ObjectTools | None:
        """The source for a class or an object with `@tool` methods, None for another one. Raises UserError."""
        is_class = inspect.isclass(found)
        kind: Any = found if is_class else type(found)
        tools = methods_of(kind)
        if not tools:
            return None
        for one in tools:
            one.schema  # noqa: B018 - a signature without a schema is refused here
        if not is_class:
            return cls(lambda: found, kind.__name__)
        try:
            inspect.signature(kind).bind(**(args or {}))
        except TypeError as error:
            raise UserError(f"tools: {kind.__name__} does not take these arguments: {error}") from None
        return cls(kind, kind.__name__, args)

    async def open(self, context: ToolContext) -> OpenTools:
        """Make the object, and create what it needs."""
        made, lock = self._make(**self._args), asyncio.Lock()

        async def one_at_a_time(function: Callable[..., Any], **arguments: Any) -> Any:
            async with lock:
                return await in_thread(function, **arguments)

        if (create := getattr(made, "create", None)) is not None:
            await _called(create, context.task, **context.kwargs_of(self.name, "create_kwargs"))
        return OpenTools(
            name=self.name,
            tools=[getattr(made, one.attribute).opened(one_at_a_time) for one in methods_of(type(made))],
            reward=self._end(made, "calc_reward", context),
            release=self._end(made, "release", context),
        )

    def _end(self, made: object, method: str, context: ToolContext) -> Callable[[], Any] | None:
        function = getattr(made, method, None)
        if function is None:
            return None
        return partial(_called, function, **context.kwargs_of(self.name, f"{method}_kwargs"))


def methods_of(kind: type) -> list[FunctionTool]:
    """The `@tool` methods of a class, in the order of their definition, those of its bases first."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found |= vars(base)
    return [one for one in found.values() if isinstance(one, FunctionTool)]


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)
