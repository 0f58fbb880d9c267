"""Call syntax: tool calls as plain text, for models without a tool format.

`calc(12+35)` calls a tool whose only parameter is a string; `add({"a": 1, "b": 2})` calls any other tool. An output is
a call when its whole stripped text is one. With a bare string, the bracket that closes the first one must be the last
character, so `f(1) + f(2)` is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from types import MappingProxyType

import orjson

from agentrl.domain.schemas import Json
from agentrl.rendering.messages import function_of, parse_arguments


@dataclass(frozen=True, slots=True)
class Signature:
    """How calls of one tool are written."""

    name: str
    bare: str | None  # the only parameter, a string written without quotes; None: arguments are a JSON object
    shown: str  # what a prompt shows, e.g. `calc(expression)`


def signature(tool: Json) -> Signature:
    """The signature of a tool in OpenAI's shape."""
    function = function_of(tool)
    name: str = function["name"]
    properties: Json = (function.get("parameters") or {}).get("properties") or {}
    match list(properties.items()):
        case []:
            return Signature(name, None, f"{name}()")
        case [(key, {**schema})] if schema.get("type", "string") == "string":
            return Signature(name, key, f"{name}({key})")
    fields = ", ".join(f'"{key}": {_type_name(schema)}' for key, schema in properties.items())
    return Signature(name, None, f"{name}({{{fields}}})")


def signatures(tools: Sequence[Json] | None) -> Mapping[str, Signature]:
    """Signatures by tool name, in order."""
    return _signatures(_written(tools)) if tools else {}


def _written(tools: Sequence[Json]) -> bytes | str:
    try:
        return orjson.dumps(tools)
    except orjson.JSONEncodeError:  # integers beyond 64 bits, half of a surrogate pair
        return json.dumps(tools)


@lru_cache(maxsize=256)
def _signatures(tools: bytes | str) -> Mapping[str, Signature]:
    return MappingProxyType({found.name: found for found in map(signature, json.loads(tools))})


def tools_line(tools: Sequence[Json]) -> str:
    """The line of the system message that names the tools."""
    return "Tools: " + ", ".join(found.shown for found in signatures(tools).values())


def write_call(call: Json, known: Mapping[str, Signature]) -> str:
    """An assistant's tool call as text. The call of an unknown tool is written bare if possible."""
    function = function_of(call)
    name, arguments = function["name"], function.get("arguments")
    match parse_arguments(arguments):
        case {**items} if not items:
            return f"{name}()"
        case {**items} if len(items) == 1:
            [(key, value)] = items.items()
            if isinstance(value, str) and (name not in known or known[name].bare == key):
                return f"{name}({value})"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{name}({text})"


def call_tag(tools: Sequence[Json]) -> str:
    """A structural tag that matches an output if all of it is a call of one of the tools."""
    calls = [_tag_of(function_of(tool), signature(tool)) for tool in tools]
    whole = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    return json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)


def _tag_of(function: Json, known: Signature) -> Json:
    inside: Json = {"type": "regex", "pattern": BARE}
    parameters = {"type": "object", **(function.get("parameters") or {})}
    if known.bare is None:
        inside = {"type": "json_schema", "json_schema": parameters}
    opened, closed = (
        {"type": "const_string", "value": f"{known.name}("},
        {"type": "const_string", "value": ")"},
    )
    if not parameters.get("properties"):
        return {"type": "const_string", "value": f"{known.name}()"}
    return {"type": "sequence", "elements": [opened, inside, closed]}


BARE = r"[^()]*(\([^()]*\)[^()]*)*"
"""Text with balanced brackets, nested at most two deep."""


_BRACKETS = re.compile(r"[()]")


class _State(Enum):
    NAME = auto()  # white space, or the beginning of a tool's name
    INSIDE = auto()  # after `name(`
    CLOSED = auto()  # after the bracket that closes the call
    CONTENT = auto()  # cannot be a call any more


class CallReader:
    """Holds text back while it may be a call, and releases it as soon as it cannot be one."""

    def __init__(self, known: Mapping[str, Signature]) -> None:
        self._known = known
        self._state = _State.NAME if known else _State.CONTENT
        self._held: list[str] = []
        self._name = ""
        self._depth = 1  # open brackets, once inside

    def push(self, text: str) -> str:
        """Add text; returns the text that is certainly content."""
        if self._state is _State.CONTENT:
            return text
        self._held.append(text)
        if self._state is _State.NAME:
            text = self._read_name()
        if self._state is _State.INSIDE:
            text = self._read_inside(text)
        if self._state is _State.CLOSED and text.strip():
            self._state = _State.CONTENT
        return self._release() if self._state is _State.CONTENT else ""

    def finish(self) -> tuple[str, str] | str:
        """The call, as name and JSON arguments; or the held text if it is not a call."""
        text = "".join(self._held).strip()
        inside = text[len(self._name) + 1 : -1]
        if self._state is _State.CLOSED:
            key = self._known[self._name].bare
            return self._name, json.dumps({key: inside}, ensure_ascii=False)
        if self._state is _State.INSIDE and text.endswith(")") and isinstance(parse_arguments(inside), dict):
            return self._name, inside.strip() or "{}"
        return self._release()

    def _read_name(self) -> str:
        """The held text after `name(`."""
        text = "".join(self._held).lstrip()
        if names := [name for name in self._known if text.startswith(f"{name}(")]:
            self._name = min(names, key=len)
            self._state = _State.INSIDE
        elif not any(name.startswith(text) for name in self._known):
            self._state = _State.CONTENT
        return text[len(self._name) + 1 :]

    def _read_inside(self, text: str) -> str:
        """The text after the bracket that closes the call."""
        if self._known[self._name].bare is None:
            return ""  # brackets inside JSON strings do not count, so only the end decides
        for bracket in _BRACKETS.finditer(text):
            self._depth += 1 if bracket[0] == "(" else -1
            if not self._depth:
                self._state = _State.CLOSED
                return text[bracket.end() :]
        return ""

    def _release(self) -> str:
        held, self._held = "".join(self._held), []
        return held


def _type_name(schema: object) -> str:
    kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return kind if isinstance(kind, str) else "any"
