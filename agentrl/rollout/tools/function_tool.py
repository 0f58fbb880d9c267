"""`@tool`: a function or a method as a tool, described by its signature and its docstring."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, overload

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.tools.blocking_call import in_thread
from agentrl.rollout.tools.tool_result import OpenTool, OpenTools, ToolContext, schema_of
from agentrl.rollout.tools.tool_signature import ToolSignature

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
Caller = Callable[..., Awaitable[Any]]


class FunctionTool:
    """A function that a model can call. It can still be called as the function that it is.

    In a class it is a method; `object_tools.py` opens the methods of an object.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        if not callable(function) or inspect.isclass(function):
            raise UserError(f"@tool: must be a function, got {function!r}")
        self.function = function
        self.name = name or str(getattr(function, "__name__", "tool"))
        if not NAME.fullmatch(self.name):
            raise UserError(f"tool {self.name!r}: a name has at most 64 letters, digits, _ and -; give @tool(name=…)")
        self.is_method = False
        self.attribute = self.name
        self._description, self._bound = description, False
        self.__doc__, self.__wrapped__, self.__module__ = function.__doc__, function, function.__module__

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.is_method = next(iter(inspect.signature(self.function).parameters), None) == "self"

    def __get__(self, instance: object | None, owner: type | None = None) -> FunctionTool:
        if instance is None or not self.is_method:
            return self
        bound = copy.copy(self)
        bound.signature = self.signature  # computed once for the class
        bound.function, bound._bound = self.function.__get__(instance, owner), True
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @cached_property
    def signature(self) -> ToolSignature:
        """The JSON schema of the arguments. Raises UserError for a signature that has no schema."""
        return ToolSignature(self.function, self.name, is_method=self.is_method)

    @property
    def schema(self) -> Json:
        """The tool's entry in a request's `tools`."""
        return schema_of(self.name, self._description or self.signature.description, self.signature.schema)

    def opened(self, blocking: Caller = in_thread) -> OpenTool:
        """The tool of an episode. `blocking` calls a function that is not async."""
        if self.is_method and not self._bound:
            raise UserError(f"tool {self.name!r} is a method: give its class, or an object")

        async def call(arguments: Json, context: ToolContext) -> object:
            keywords = self.signature.validated(arguments)
            if self.signature.context_name is not None:
                keywords[self.signature.context_name] = context
            if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
                return await self.function(**keywords)
            found = await blocking(self.function, **keywords)
            return await found if inspect.isawaitable(found) else found

        return OpenTool(name=self.name, schema=self.schema, call=call)

    async def open(self, context: ToolContext) -> OpenTools:
        """The tool as a source: it has no state of an episode."""
        return OpenTools(name=self.name, tools=[self.opened()])


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function or a method, plain or async, a tool.

    The description and those of the parameters come from the docstring, the types from the annotations.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda found: FunctionTool(found, name=name, description=description)
