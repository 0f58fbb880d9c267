"""Converts unquoted argument values by the tool's JSON schema.

XML-style formats write `true` for a boolean and for a string alike, so the parameter's type decides. A value that fits
no type of its parameter stays a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.rendering.messages import MAX_DEPTH, deeper_than, function_of

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_PYTHON = {"True": True, "False": False, "None": None}
"""Templates that write values with Jinja's `string` filter spell them as Python does."""
_MAX_REFS = 16


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for values that a client could not parse: `NaN`, `1e999`, half of a
    surrogate pair, a thousand nested brackets."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    if deeper_than(MAX_DEPTH, value):
        raise ValueError("nested too deeply")
    return value


def write_json(value: Any) -> str:
    """Arguments as the JSON text that clients get."""
    return json.dumps(value, ensure_ascii=False)


class Parameters:
    """The parameter types of a request's tools."""

    def __init__(self, tools: Sequence[Json] | None) -> None:
        self._schemas = {function_of(tool)["name"]: function_of(tool).get("parameters") or {} for tool in tools or []}
        self.types = lru_cache(maxsize=1024)(self._types_of)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(self._schemas)

    def value(self, tool: str, key: str, text: str) -> Any:
        """The value of a parameter: `text` itself for a string, else a value of one of the parameter's types."""
        types = self.types(tool, key)
        if types == {"string"}:
            return text
        found = _plain_value(text)
        if found is not _NONE and _fits(found, types):
            return found
        return text

    def _types_of(self, tool: str, key: str) -> frozenset[str]:
        schema = self._schemas.get(tool, {})
        properties = schema.get("properties") or {}
        return frozenset(_types(properties.get(key), schema, _MAX_REFS)) or TYPES


_NONE = object()


def _plain_value(text: str) -> Any:
    stripped = text.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    try:
        return read_json(stripped)
    except ValueError:
        return _NONE


def _fits(value: Any, types: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return not types.isdisjoint(("integer", "number"))
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case str():  # a quoted string: unless every type is allowed, the quotes belong to the text
            return types == TYPES
        case list():
            return "array" in types
    return "object" in types


def _types(schema: Any, root: Json, refs: int) -> set[str]:
    """The types that a schema allows; an empty set if the schema does not declare any."""
    if not isinstance(schema, dict) or refs < 0:
        return set()
    found: set[str] = set()
    declared = schema.get("type")
    found |= set(_strings([declared] if isinstance(declared, str) else declared))
    if schema.get("nullable") is True and found:
        found.add("null")
    if not found:
        values = schema.get("enum")
        found |= {_type_of(value) for value in values} if isinstance(values, list) else set()
        found |= {_type_of(schema["const"])} if "const" in schema else set()
    for key in ("anyOf", "oneOf", "allOf"):
        if not found and isinstance(schema.get(key), list):
            branches = [_types(branch, root, refs - 1) for branch in schema[key]]
            if key == "allOf" or all(branches):
                found = set().union(*branches)
    if not found and isinstance(schema.get("$ref"), str):
        found = _types(_resolved(schema["$ref"], root), root, refs - 1)
    return found & TYPES


def _resolved(ref: str, root: Json) -> Any:
    found: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found if ref.startswith("#/") else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
