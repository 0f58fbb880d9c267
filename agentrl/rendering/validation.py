"""Rejects messages and tools that cannot be rendered, with a 400 that names the field."""

from __future__ import annotations

from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_RENDERED = {"function_call": "use tool_calls", "audio": "the model reads text"}
"""Message fields that would be lost, with alternatives."""


def validate_messages(messages: Any) -> None:
    """Validate a conversation in OpenAI's format. Raises RequestError with a param like `messages[3].content`."""
    if not isinstance(messages, list) or not messages:
        raise _refused("must be a non-empty list", "messages")
    for i, message in enumerate(messages):
        _message(message, f"messages[{i}]")


def validate_tools(tools: Any) -> None:
    """Validate a request's tools. Raises RequestError with a param like `tools[0].function.name`."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise _refused("must be a list", "tools", code="invalid_tools")
    for i, tool in enumerate(tools):
        _function_tool(tool, f"tools[{i}]")


def _message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise _refused("must be an object", at)
    role = message.get("role")
    if role not in ROLES:
        raise _refused(f"unknown role {role!r}{did_you_mean(str(role), ROLES)}", f"{at}.role")
    _content(message.get("content"), f"{at}.content", optional=role == "assistant")
    if role == "tool":
        _text(message.get("tool_call_id"), f"{at}.tool_call_id")
    for key in ("name", "reasoning_content", "reasoning"):
        if message.get(key) is not None:
            _text(message[key], f"{at}.{key}", empty=True)
    for key, instead in NOT_RENDERED.items():
        if message.get(key) is not None:
            raise _refused(f"is not supported: {instead}", f"{at}.{key}")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if role != "assistant":
        raise _refused(f"a {role} message cannot call tools", f"{at}.tool_calls")
    if not isinstance(calls, list):
        raise _refused("must be a list", f"{at}.tool_calls")
    for i, call in enumerate(calls):
        _tool_call(call, f"{at}.tool_calls[{i}]")


def _content(content: Any, at: str, *, optional: bool) -> None:
    if content is None and optional:
        return
    if not isinstance(content, list):
        _text(content, at, empty=True)
        return
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _refused(f"parts of type {kind!r} are not supported, only text", f"{at}[{i}]")
        _text(part.get("text"), f"{at}[{i}].text", empty=True)


def _tool_call(call: Any, at: str) -> None:
    if not isinstance(call, dict):
        raise _refused("must be an object", at)
    _text(call.get("id"), f"{at}.id")
    function = _function(call, at)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, dict):
        _text(arguments, f"{at}.function.arguments", empty=True)


def _function_tool(tool: Any, at: str) -> None:
    if not isinstance(tool, dict):
        raise _refused("must be an object", at, code="invalid_tools")
    function = _function(tool, at, code="invalid_tools")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise _refused("must be a JSON schema", f"{at}.function.parameters", code="invalid_tools")
    if not isinstance(parameters.get("properties") or {}, dict):
        raise _refused("must be an object", f"{at}.function.parameters.properties", code="invalid_tools")


def _function(owner: Json, at: str, code: str = "invalid_messages") -> Json:
    if owner.get("type", "function") != "function":
        raise _refused(f"type {owner['type']!r} is not supported, only function", f"{at}.type", code=code)
    function = owner.get("function")
    if not isinstance(function, dict):
        raise _refused("must be an object", f"{at}.function", code=code)
    _text(function.get("name"), f"{at}.function.name", code=code)
    return function


def _text(value: Any, at: str, *, empty: bool = False, code: str = "invalid_messages") -> None:
    if not isinstance(value, str):
        raise _refused(f"must be a string, got {_kind(value)}", at, code=code)
    if not value and not empty:
        raise _refused("must not be empty", at, code=code)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _refused(f"is not valid Unicode: {error.reason}", at, code=code) from None


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _refused(why: str, at: str, *, code: str = "invalid_messages") -> RequestError:
    return RequestError(400, f"{at}: {why}", code=code, param=at)
