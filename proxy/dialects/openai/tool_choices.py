"""OpenAI's `tool_choice`, checked against the request's tools."""

from __future__ import annotations

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.dialects.model_request import Named, ToolChoice
from agentrl.proxy.dialects.parameter_errors import unsupported


def tool_choice(choice: str | Json | None, tools: list[Json] | None) -> ToolChoice:
    """OpenAI's `tool_choice`. Raises RequestError 400."""
    found: ToolChoice
    match choice:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required":
            found = "required"
        case {"type": "function", "function": {"name": str(name)}}:
            found = Named(name)
        case str():
            raise bad_parameter("tool_choice", f"tool_choice must be auto, none, required or a tool, got {choice!r}")
        case _:
            raise unknown_choice(choice, '{"type": "function", "function": {"name": …}}')
    return among(found, tools)


def unknown_choice(choice: Json, named: str) -> RequestError:
    """The error for an unknown `tool_choice`; `named` is the form that names one tool."""
    kind = f"tool_choice of type {choice['type']!r}" if "type" in choice else "this tool_choice"
    return unsupported("tool_choice", f"{kind} is not supported; choose auto, none, required or {named}")


def among(choice: ToolChoice, tools: list[Json] | None) -> ToolChoice:
    """Check a choice that needs tools against the request's tools. Raises RequestError 400."""
    names = [tool["function"]["name"] for tool in tools or []]
    if not names:
        raise bad_parameter("tool_choice", "tool_choice asks for a tool, but the request has no tools")
    if isinstance(choice, Named) and choice.name not in names:
        raise bad_parameter("tool_choice", f"tool_choice names {choice.name!r}; the tools are {', '.join(names)}")
    return choice
