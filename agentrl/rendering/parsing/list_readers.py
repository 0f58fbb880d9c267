"""Reads calls without a closing marker: JSON or Python call syntax up to the end of the reply."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from agentrl.rendering.messages import MAX_DEPTH, deeper_than
from agentrl.rendering.parsing.alphabet import Alphabet
from agentrl.rendering.parsing.call_readers import CallReader, Found, Items, call_of, is_name
from agentrl.rendering.parsing.typed_values import Parameters, read_json, write_json

_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")
_SPACE = re.compile(r"\s*")
_LITERAL = re.compile(r"""\"[^"\\]*(?:\\.[^"\\]*)*("?)|'[^'\\]*(?:\\.[^'\\]*)*('?)""", re.DOTALL)
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}


class LlamaReader(CallReader):
    """`{"name": "f", "parameters": {…}}`, several with `;` between them; the names must be tools of the request."""

    def read(self, body: str, parameters: Parameters) -> Items | None:
        text = self._alphabet.spelled(body)
        items: Items = []
        at = 0
        while True:
            start = between.end() if (between := _BETWEEN.match(text, at)) else at
            value, end = json_at(text, start)
            found = call_of(value, ("parameters", "arguments"))
            if found is None or found.name not in parameters.names:
                break
            items.append(Found(found.name, found.arguments))
            at = end
        return with_rest(items, text[at:])

    def goes_on(self, body: str) -> bool:
        return False


class Llama4Reader(LlamaReader):
    """As Llama 3, or Python's syntax, which the model's own instructions ask for."""

    def read(self, body: str, parameters: Parameters) -> Items | None:
        found = super().read(body, parameters)
        if found is not None:
            return found
        calls = python_calls(self._alphabet.spelled(body))
        known = calls is not None and all(isinstance(call, Found) and call.name in parameters.names for call in calls)
        return calls if known else None


class PythonReader(CallReader):
    """`[f(a=1), g()]`."""

    def read(self, body: str, parameters: Parameters) -> Items | None:
        return python_calls(self._alphabet.spelled(body))

    def goes_on(self, body: str) -> bool:
        return in_literal(body)


class MistralReader(CallReader):
    """A JSON list of calls; or, with newer tokenizers, `f[ARGS]{…}` once for each `[TOOL_CALLS]`."""

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__(alphabet)
        self._head = self._pattern(r"\s*([^\s\[\ud800-\udbff]+)\s*(?:«[CALL_ID]»\s*(\w+)\s*)?«[ARGS]»")
        self._next = self._pattern(r"\s*«[TOOL_CALLS]»")

    def read(self, body: str, parameters: Parameters) -> Items | None:
        if body.lstrip().startswith("["):
            return self._listed(self._alphabet.spelled(body))
        items: Items = []
        start = at = 0
        while (head := self._head.match(body, start)) and is_name(head[1]):
            end = json_end(body, head.end())
            arguments = self._object(body[head.end() : end])  # a string in it may hold markers
            if arguments is None:
                break
            items.append(Found(head[1], arguments, head[2]))
            at = end
            if (following := self._next.match(body, at)) is None:
                break
            start = following.end()
        return with_rest(items, body[at:])

    def goes_on(self, body: str) -> bool:
        return False

    def _listed(self, text: str) -> Items | None:
        value, end = json_at(text, len(text) - len(text.lstrip()))
        calls = [call_of(item, ("arguments",)) for item in value] if isinstance(value, list) else []
        found = [call for call in calls if call is not None]
        return with_rest([*found], text[end:]) if found and len(found) == len(calls) else None


class GemmaReader(CallReader):
    """`call:f{key:value}`: keys without quotes, strings between marker tokens."""

    _HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
    QUOTE = '<|"|>'

    def read(self, body: str, parameters: Parameters) -> Items | None:
        head = self._HEAD.match(body)
        if head is None or not is_name(head[1]):
            return None
        try:
            values = _GemmaValues(body, head.end(), self._alphabet)
            value = values.value(0)
        except ValueError:
            return None
        if body[values.at :].strip() or not isinstance(value, dict):
            return None
        return [Found(head[1], write_json(value))]

    def goes_on(self, body: str) -> bool:
        return body.count(self._alphabet.marked(self.QUOTE)) % 2 == 1


class _GemmaValues:
    """Reads values in Gemma's syntax; `at` is the position in the text."""

    _KEY = re.compile(r"([^:,{}\[\]\ud800-\udbff]+):")
    _WORD = re.compile(r"[^,{}\[\]\ud800-\udbff]+")

    def __init__(self, text: str, at: int, alphabet: Alphabet) -> None:
        self._text = text
        self.at = at
        self._alphabet = alphabet
        self._quote = alphabet.marked(GemmaReader.QUOTE)

    def value(self, depth: int) -> Any:
        """Read the value at the current position. Raises ValueError if there is none."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._takes(self._quote):
            return self._string()
        if self._takes("{"):
            return dict(self._pairs(depth + 1))
        if self._takes("["):
            return self._list(depth + 1)
        found = self._WORD.match(self._text, self.at)
        if found is None or not found[0].strip():
            raise ValueError("a value is missing")
        self.at = found.end()
        if found[0].strip() == "None":  # as templates write null inside of lists
            return None
        try:
            return read_json(found[0].strip())
        except ValueError:
            return found[0].strip()

    def _string(self) -> str:
        end = self._text.find(self._quote, self.at)
        if end < 0:
            raise ValueError("a string has no end")
        text, self.at = self._text[self.at : end], end + len(self._quote)
        return self._alphabet.spelled(text)

    def _key(self) -> str:
        if self._takes(self._quote):
            key = self._string()
            if not self._takes(":"):
                raise ValueError("a key has no value")
            return key
        found = self._KEY.match(self._text, self.at)
        if found is None or not found[1].strip():
            raise ValueError("a key is missing")
        self.at = found.end()
        return found[1].strip()

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._takes("}"):
            if pairs and not self._takes(","):
                raise ValueError("a comma is missing")
            key = self._key()
            if key in pairs:
                raise ValueError("a key stands twice")
            pairs[key] = self.value(depth)
        return pairs

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._takes("]"):
            if items and not self._takes(","):
                raise ValueError("a comma is missing")
            items.append(self.value(depth))
        return items

    def _takes(self, text: str) -> bool:
        at = found.end() if (found := _SPACE.match(self._text, self.at)) else self.at
        if not self._text.startswith(text, at):
            return False
        self.at = at + len(text)
        return True


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at position `start`, and the position of its end; (None, `start`) if there is no value."""
    end = json_end(text, start)
    try:
        return read_json(text[start:end]), end
    except ValueError:
        return None, start


def json_end(text: str, start: int) -> int:
    """The end of the JSON object or list at position `start`; `start` if there is none."""
    if text[start : start + 1] not in ("{", "["):
        return start
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def with_rest(items: Items, rest: str) -> Items | None:
    """The calls, followed by the remaining text; None without a call."""
    if not items:
        return None
    return [*items, rest] if rest.strip() else items


def in_literal(text: str) -> bool:
    """Whether Python source ends inside a string literal. A literal that contains a line break does not count."""
    for found in _LITERAL.finditer(text):
        if not (found[1] or found[2]):
            return "\n" not in found[0]
    return False


def python_calls(text: str) -> Items | None:
    """`[f(a=1), g()]` as calls; None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return [_python_call(node) for node in tree.elts] or None if isinstance(tree, ast.List) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> Found:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    name = ast.unparse(node.func)
    arguments = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if not is_name(name) or len(arguments) != len(node.keywords) or deeper_than(MAX_DEPTH, arguments):
        raise ValueError("not a call of a tool")
    return Found(name, write_json(arguments))


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(bool() | str() | int() | None as value):
            if isinstance(value, str):
                value.encode()
            return value
        case ast.Constant(float(value)) if math.isfinite(value):
            return value
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float()) as positive) if not isinstance(positive.value, bool):
            return -_python_value(positive)
        case ast.List(items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys, values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {ast.literal_eval(key): _python_value(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("not a value that JSON has")
