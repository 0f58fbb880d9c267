"""Converts tools of Anthropic's Messages to the shape of Chat Completions, and decides where the prompt defines them.

listed     in the prompt's list of tools
deferred   defined where a tool's result refers to it or a system message adds it, so that the prompt only grows
left out   tools that Anthropic's servers run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.dialects.anthropic.message_types import CacheControl, DefinedTool, Name, NamedTool
from agentrl.proxy.dialects.body_decoding import invalid_at
from agentrl.proxy.dialects.parameter_errors import unsupported

SERVER_TOOLS = ("advisor", "code_execution", "mcp_toolset", "tool_search_tool", "web_fetch", "web_search")
"""Prefixes of the types of tools that Anthropic's servers run; a date follows."""


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the agent runs, as the request defines it."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    # Accepted without effect.
    strict: bool | None = None  # tool calls are sampled without a grammar
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


@dataclass(slots=True)
class Toolbox:
    """The tools of one request."""

    listed: list[Json] = field(default_factory=list)  # in the prompt from the start
    deferred: dict[str, Json] = field(default_factory=dict)  # by name
    loaded: dict[str, Json] = field(default_factory=dict)  # deferred tools that the conversation has defined
    left_out: list[str] = field(default_factory=list)  # names of tools that Anthropic's servers run

    def load(self, tool: NamedTool | DefinedTool, at: str) -> str:
        """The prompt's text that makes a tool callable. Raises RequestError 400 for an unknown tool."""
        if isinstance(tool, DefinedTool):
            added = chat_tool(tool.definition, f"{at}.definition")
            if added is None:
                self.left_out.append(_name(tool.definition))
                return ""
            self.deferred[added["function"]["name"]] = added
            return self._written(added)
        return self.load_named(tool.name, at)

    def load_named(self, name: str, at: str) -> str:
        """The prompt's text for a tool; empty for a listed one. Raises RequestError 400 for an unknown name."""
        if any(tool["function"]["name"] == name for tool in self.listed):
            return ""
        if name not in self.deferred:
            raise RequestError(400, f"{at}: no tool is called {name!r}", code="invalid_messages", param=at)
        return self._written(self.deferred[name])

    def _written(self, tool: Json) -> str:
        self.loaded[tool["function"]["name"]] = tool
        return f"<functions>\n<function>{orjson.dumps(tool['function']).decode()}</function>\n</functions>\n"


def toolbox(tools: Sequence[Json] | None) -> Toolbox:
    """The tools of a request. Raises RequestError 400 for an unsupported one."""
    found = Toolbox()
    for i, tool in enumerate(tools or []):
        made = chat_tool(tool, f"tools[{i}]")
        if made is None:
            found.left_out.append(_name(tool))
        elif tool.get("defer_loading"):
            found.deferred[made["function"]["name"]] = made
        else:
            found.listed.append(made)
    return found


def chat_tool(tool: Json, at: str) -> Json | None:
    """A tool in the shape of Chat Completions; None for one that Anthropic's servers run. Raises RequestError."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        if isinstance(kind, str) and kind.startswith(SERVER_TOOLS):
            return None
        why = "give the agent's own tools a name and an input_schema"
        raise unsupported(at, f"{at}: the type {kind!r} is not supported here: {why}")
    given = {name: value for name, value in tool.items() if name != "type" and value is not None}
    try:
        found = msgspec.convert(given, Tool)
    except msgspec.ValidationError as error:
        raise invalid_at(str(error), at) from error
    if found.allowed_callers is not None and "direct" not in found.allowed_callers:
        why = 'the policy calls tools itself, so "direct" must be among them'
        raise unsupported(f"{at}.allowed_callers", f"{at}.allowed_callers: {why}")
    schema = found.input_schema
    if not isinstance(schema.get("properties") or {}, dict):
        raise bad_parameter(f"{at}.input_schema.properties", f"{at}.input_schema.properties: must be an object")
    if found.input_examples:
        schema = schema | {"examples": found.input_examples}
    function: Json = {"name": found.name, "parameters": schema}
    if found.description is not None:
        function["description"] = found.description
    return {"type": "function", "function": function}


def _name(tool: Json) -> str:
    return str(tool.get("name") or tool.get("type"))
