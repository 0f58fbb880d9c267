"""Errors for JSON that cannot be read or written again, with the place of the value at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from agentrl.errors import RequestError


def unreadable(body: bytes, error: Exception) -> RequestError:
    """The error for a body that cannot be read. It names the place of an unpaired surrogate."""
    try:
        place = next((at for at, value in _values(json.loads(body)) if not _is_text(value)), None)
    except (ValueError, RecursionError):
        place = None
    if place is None:
        return RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json")
    message = f"{place}: half of a surrogate pair (\\ud800 to \\udfff alone) is not text"
    return RequestError(400, message, code="invalid_json", param=place)


def unwritable(data: msgspec.Struct, error: Exception) -> RequestError:
    """The error for values that cannot be written again. An integer that is too large is named by its place."""
    for at, value in _values(data):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return RequestError(400, f"{at}: this integer has more than 64 bits", code="invalid_json", param=at)
    return RequestError(400, f"the body cannot be written again: {error}", code="invalid_json")


def _values(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key, and every value that is neither an object nor a list, with its place."""
    stack = [("", value)]
    while stack:
        at, item = stack.pop()
        if isinstance(item, msgspec.Struct):
            item = msgspec.structs.asdict(item)
        if isinstance(item, dict):
            yield from ((at, name) for name in item)
            stack += [(f"{at}.{name}" if at else str(name), below) for name, below in item.items()]
        elif isinstance(item, list):
            stack += [(f"{at}[{i}]", below) for i, below in enumerate(item)]
        else:
            yield at, item


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
