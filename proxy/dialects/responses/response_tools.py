"""Converts tools of the Responses API to functions, the one kind of tool that a policy calls.

tool        in the prompt                                in the answer
function    unchanged                                    unchanged
namespace   its functions, as `NAMESPACE__FUNCTION`      a call with a `namespace` field
built in    left out: needs OpenAI's servers or models   -
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter, did_you_mean
from agentrl.proxy.dialects.parameter_errors import unsupported
from agentrl.rendering.validation import validate_tools

BUILT_IN = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
"""Types of tools that have no schema for a prompt."""
CUSTOM = ": give a function with one string as its parameter"
JOINT = "__"
_DATED = re.compile(r"_\d{4}_\d{2}_\d{2}$")
_FIELDS = ("name", "description", "parameters", "strict")
_HARMLESS = ("defer_loading", "output_schema")
"""Fields of a function that are accepted without effect: the prompt defines every function from the start."""


def chat_tools(tools: Sequence[Json] | None) -> tuple[list[Json] | None, list[str]]:
    """Functions in the shape of Chat Completions, and the types of the tools left out. Raises RequestError 400."""
    found: list[Json] = []
    left_out: list[str] = []
    for i, tool in enumerate(tools or []):
        at, kind = f"tools[{i}]", tool.get("type")
        if kind == "function":
            found.append(_function(tool, at))
        elif kind == "namespace":
            found += _namespace(tool, at)
        elif isinstance(kind, str) and _DATED.sub("", kind) in BUILT_IN:
            left_out.append(kind)
        else:
            instead = CUSTOM if kind == "custom" else did_you_mean(str(kind), ("function", "namespace"))
            raise unsupported(f"{at}.type", f"tools of type {kind!r} are not supported{instead}")
    if namespaces_of(tools):
        names = Counter(str(tool["function"].get("name")) for tool in found)
        if twice := [name for name, n in names.items() if n > 1]:
            raise bad_parameter("tools", f"tools: two functions are called {twice[0]!r}, with the namespace before it")
    try:
        validate_tools(found)
    except RequestError as error:  # in Responses, tools have no inner `function` object
        message, place = (text.replace(".function", "", 1) for text in (str(error), error.param or ""))
        raise RequestError(error.status, message, code=error.code, param=place) from error
    return found or None, list(dict.fromkeys(left_out))


def joined(namespace: str | None, name: str) -> str:
    """The policy's name for a function of a namespace."""
    if namespace is None:
        return name
    return f"{namespace}{'' if namespace.endswith(JOINT) else JOINT}{name}"


def caller_name(tools: Sequence[Json] | None, name: str) -> Json:
    """A function's name as the caller gave it: `name`, and `namespace` if it has one."""
    for namespace, own in _named(tools):
        if joined(namespace, own) == name:
            return {"namespace": namespace, "name": own}
    return {"name": name}


def namespaces_of(tools: Sequence[Json] | None) -> list[str]:
    """The names of a request's namespaces."""
    return [tool["name"] for tool in tools or [] if tool.get("type") == "namespace"]


def response_tools(tools: Sequence[Json] | None, namespaces: Sequence[str]) -> list[Json]:
    """Tools in the shape of Chat Completions as tools of a response, in their namespaces."""
    found: list[Json] = []
    grouped: dict[str, list[Json]] = {name: [] for name in namespaces}
    for tool in tools or []:
        function: Json = {"type": "function", **tool["function"]}
        home = next((space for space in namespaces if function["name"].startswith(joined(space, ""))), None)
        if home is None:
            found.append(function)
        else:
            grouped[home].append(function | {"name": function["name"].removeprefix(joined(home, ""))})
    return found + [{"type": "namespace", "name": name, "tools": inner} for name, inner in grouped.items()]


def _named(tools: Sequence[Json] | None) -> Iterator[tuple[str, str]]:
    for tool in tools or []:
        if tool.get("type") == "namespace":
            yield from ((tool["name"], function["name"]) for function in tool["tools"])


def _namespace(tool: Json, at: str) -> Iterator[Json]:
    """A namespace's functions. The first description begins with that of the namespace: chat templates have no
    namespaces.
    """
    name, description, inner = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise bad_parameter(f"{at}.name", f"{at}.name: a namespace needs a name")
    if not isinstance(inner, list):
        raise bad_parameter(f"{at}.tools", f"{at}.tools: must be a list")
    for i, one in enumerate(inner):
        place = f"{at}.tools[{i}]"
        if not isinstance(one, dict) or one.get("type") != "function":
            raise unsupported(f"{place}.type", f"{place}: a namespace holds tools of type function")
        tool = _function(one, place)
        function = tool["function"]
        if isinstance(function.get("name"), str):
            function["name"] = joined(name, function["name"])
        if i == 0 and isinstance(description, str) and description:
            own = function.get("description")
            function["description"] = f"{name}: {description}" + (f"\n\n{own}" if own else "")
        yield tool


def _function(tool: Json, at: str) -> Json:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    if function.pop("async", False) is not False:
        raise unsupported(f"{at}.async", f"{at}.async is not supported: the agent answers a call before the next turn")
    callers = function.pop("allowed_callers", ["direct"])
    if not isinstance(callers, list) or "direct" not in callers:
        raise unsupported(f"{at}.allowed_callers", f"{at}.allowed_callers must hold 'direct': the policy is the caller")
    for name in _HARMLESS:
        function.pop(name, None)
    for name in function:
        if name not in _FIELDS:
            raise unsupported(f"{at}.{name}", f"{at}: unknown field{did_you_mean(name, _FIELDS)}")
    if not isinstance(function.get("strict", False), bool):
        raise bad_parameter(f"{at}.strict", f"{at}.strict: must be a boolean")
    return {"type": "function", "function": function}
