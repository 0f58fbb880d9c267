"""Reads the tools of an agent: names and mappings of a config, or objects."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.tools.function_tool import FunctionTool, tool
from agentrl.rollout.tools.mcp_entry import mcp_entry
from agentrl.rollout.tools.mcp_tools import McpTools
from agentrl.rollout.tools.object_tools import ObjectTools
from agentrl.rollout.tools.tool_result import ToolSource
from agentrl.rollout.tools.verl.verl_tools import KEYS, is_verl_tool, verl_tool
from agentrl.user_code import load_object


def sources_of(entries: Sequence[object]) -> list[ToolSource]:
    """The sources of tools. Raises UserError for one that cannot be loaded."""
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise UserError("tools: must be a list")
    return [source for number, entry in enumerate(entries) for source in _read(entry, f"tools[{number}]")]


def _read(entry: object, at: str) -> list[ToolSource]:
    if isinstance(entry, str):
        return _of_object(load_object(entry, at), at)
    if isinstance(entry, Mapping):
        return _of_mapping(entry, at)
    return _of_object(entry, at)


def _of_mapping(entry: Mapping[str, Any], at: str) -> list[ToolSource]:
    if "mcp" in entry:
        return [McpTools(mcp_entry(entry, at), at)]
    if "class_name" in entry:
        return [_of_verl(entry, at)]
    if "use" not in entry:
        has = ", ".join(map(str, entry)) or "none"
        raise UserError(f"{at}: needs the key `use`, `mcp` or `class_name`; it has {has}")
    if unknown := sorted(map(str, entry.keys() - {"use", "args"})):
        raise UserError(f"{at}: there is no key {unknown[0]!r}; an entry with `use` may have `args`")
    return _of_object(load_object(str(entry["use"]), f"{at}.use"), at, entry.get("args") or {})


def _of_verl(entry: Mapping[str, Any], at: str) -> ToolSource:
    """An entry as in verl's file of tools."""
    if unknown := sorted(map(str, entry.keys() - KEYS)):
        raise UserError(f"{at}: there is no key {unknown[0]!r}{did_you_mean(unknown[0], KEYS)}")
    name = str(entry["class_name"])
    found = load_object(name if ":" in name else ":".join(name.rsplit(".", 1)), f"{at}.class_name")
    if not inspect.isclass(found) or not is_verl_tool(found):
        raise UserError(f"{at}.class_name: {name!r} must be a class with `create`, `execute` and `release`")
    return verl_tool(found, at, entry.get("config"), entry.get("tool_schema"))


def _of_object(found: object, at: str, args: Mapping[str, Any] | None = None) -> list[ToolSource]:
    """The sources that an object stands for."""
    if isinstance(found, list | tuple):
        return [source for one in found for source in _of_object(one, at, args)]
    methods = ObjectTools.of(found, args) if not isinstance(found, FunctionTool) else None
    if methods is not None:
        return [methods]
    if is_verl_tool(found):
        return [verl_tool(found, at, args)]
    if args:
        raise UserError(f"{at}: only a class takes `args`")
    if inspect.isfunction(found):
        found = tool(found)
    if isinstance(found, FunctionTool):
        found.opened()  # a signature without a schema is refused here
        return [found]
    if not inspect.isclass(found) and inspect.iscoroutinefunction(getattr(found, "open", None)):
        source: Any = found
        return [source]
    raise UserError(f"{at}: {found!r} is no tool: give a function, or a class with @tool methods")
