"""Reading chat messages in OpenAI's shape: the few accessors that every renderer shares."""

from __future__ import annotations

import json
from typing import Any

from agentrl.domain.schemas import Json


def text_of(message: Json) -> str:
    """The text of a message: a string, or its text parts joined; "" for null."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def role_of(message: Json) -> str:
    """The role a model knows: `developer` is what newer SDKs call `system`."""
    role: str = message["role"]
    return "system" if role == "developer" else role


def function_of(tool: Json) -> Json:
    """The function of a tool or of a tool call."""
    function: Json = tool["function"]
    return function


MAX_DEPTH = 100
"""Arguments nested deeper are text: no tool asks for them, and walking them would end in a RecursionError."""


def parse_arguments(arguments: Any) -> Any:
    """Tool arguments as a value. Text that is not JSON stays the text it is; no text means no arguments."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):  # models write anything, also a thousand brackets
        return arguments
    return arguments if deeper_than(MAX_DEPTH, value) else value


def deeper_than(depth: int, value: Any) -> bool:
    """Whether lists and objects are nested more than `depth` deep."""
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
