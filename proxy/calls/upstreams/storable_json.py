"""Parses JSON that is to be stored."""

from __future__ import annotations

from typing import Any

import orjson


def storable_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, and for nesting too deep to be written again."""
    value = orjson.loads(text)
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise ValueError("it is nested too deeply") from error
    return value
