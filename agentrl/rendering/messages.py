"""Accessors for chat messages in OpenAI's format, shared by all renderers."""

from __future__ import annotations

import json
from typing import Any

from agentrl.domain.schemas import Json


def text_of(message: Json) -> str:
    """The text of a message: a string, or its joined text parts; "" for null."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def role_of(message: Json) -> str:
    """The role that a model knows: `developer` becomes `system`."""
    role: str = message["role"]
    return "system" if role == "developer" else role


def function_of(tool: Json) -> Json:
    """The function of a tool or of a tool call."""
    function: Json = tool["function"]
    return function


MAX_DEPTH = 100
"""Deeper arguments stay text, since walking them would raise RecursionError."""


def parse_arguments(arguments: Any) -> Any:
    """Parse tool arguments. Text that is not JSON stays text; empty text means no arguments."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is invalid
    except (ValueError, RecursionError):  # invalid or too deeply nested
        return arguments
    return arguments if deeper_than(MAX_DEPTH, value) else value


def deeper_than(depth: int, value: Any) -> bool:
    """Whether lists and objects are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True
