"""Builds structural tags: grammars of one tool call in a format's own syntax, for `tool_choice`.

A renderer writes calls with known keys and values; the constant text around them is the format's skeleton:

    <tool_call> <function=  KEY  > \\n  VALUE  \\n</parameter>  <parameter=  KEY  …  </function> </tool_call>
    ──────── first ───────       between        end              next           ──────── last ────────

Marker tokens are tokens in the grammar too. Formats with arguments as one JSON object need only a prefix and a suffix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentrl.domain.schemas import Json
from agentrl.rendering.messages import function_of
from agentrl.rendering.parsing.alphabet import Alphabet
from agentrl.rendering.parsing.output_formats import GEMMA, LFM, LLAMA4
from agentrl.rendering.parsing.parser_choice import Reads
from agentrl.rendering.parsing.typed_values import Parameters

Write = Callable[[Json], str]
"""Maps arguments to the text of one call (with `Alphabet` letters), without the part in the prompt."""

_KEYS = ("QKEYA", "QKEYB")
_STRINGS = ("QVALA", "QVALB")
_NUMBERS = (717171, 727272)
ANY_ID = 97391
"""Placeholder for a call's index or id, which the model chooses."""
_IDS = {f"call{ANY_ID:05}": "[a-zA-Z0-9]{9}", str(ANY_ID): "[0-9]{1,3}"}
_CLOSING = re.compile(r"</[^<>]+>")
_LETTERS = re.compile(f"([\ud800-\udbff]|{'|'.join(_IDS)})")
MAX_OPTIONAL = 16
"""Maximum parameters of a tool without required ones, in formats with separate parameters."""


class NoTag(ValueError):
    """The format or the tool has no grammar."""


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """The constant text around a call's keys and values."""

    first: str
    between: str
    end: str
    next: str
    last: str


def structural_tag(
    tools: Sequence[Json],
    write: Callable[[str], Write],
    reads: Reads,
    alphabet: Alphabet,
    stop_token_ids: Iterable[int],
) -> str:
    """A tag that matches one call of one of the tools. Raises NoTag."""
    parts = _Parts(alphabet, stop_token_ids)
    calls = []
    for tool in tools:
        calls.append(parts.joined(*_call(tool, write(function_of(tool)["name"]), reads, parts)))
    whole = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    return json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)


class _Parts:
    """Builds grammar parts from marked text."""

    def __init__(self, alphabet: Alphabet, stop_token_ids: Iterable[int]) -> None:
        self._ids = {letter: id for id, letter in alphabet.letters.items()}
        self._never = sorted({*alphabet.letters, *stop_token_ids})

    def text(self, marked: str) -> list[Json]:
        """A constant."""
        return [self._part(part) for part in _LETTERS.split(marked) if part]

    def _part(self, part: str) -> Json:
        if part in self._ids:
            return {"type": "token", "token": self._ids[part]}
        if part in _IDS:
            return {"type": "regex", "pattern": _IDS[part]}
        return {"type": "const_string", "value": part}

    def string(self, end: str) -> list[Json]:
        """Any text up to and including the first `end`."""
        if end[:1] in self._ids:
            free: Json = {"type": "any_tokens", "exclude_tokens": self._never}
            return [free, *self.text(end)]
        before, *rest = _LETTERS.split(end)
        if not before.strip():
            raise NoTag("strings have no end")
        free = {"type": "any_text", "excludes": _CLOSING.findall(before)}
        return [{"type": "tag", "begin": "", "content": free, "end": before}, *self.text("".join(rest))]

    def joined(self, *parts: Json) -> Json:
        """A sequence of parts."""
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def _call(tool: Json, write: Write, reads: Reads, parts: _Parts) -> list[Json]:
    parameters = {"type": "object", **(function_of(tool).get("parameters") or {})}
    strings = dict(zip(_KEYS, _STRINGS, strict=True))
    written = write(strings)
    for separators in ((", ", ": "), (",", ":")):
        head, found, tail = written.partition(json.dumps(strings, separators=separators))
        if found:
            return [*parts.text(head), {"type": "json_schema", "json_schema": parameters}, *parts.text(tail)]
    return _parameters(tool, parameters, write, reads, parts)


def _parameters(tool: Json, parameters: Json, write: Write, reads: Reads, parts: _Parts) -> list[Json]:
    """The grammar of a call in a format with separate parameters."""
    numbers = _skeleton(write(dict(zip(_KEYS, _NUMBERS, strict=True))), [str(number) for number in _NUMBERS])
    quoted = reads in (LFM, LLAMA4)  # Python literals, which include all JSON values
    strings = numbers if quoted else _skeleton(write(dict(zip(_KEYS, _STRINGS, strict=True))), _STRINGS)
    if (strings.first, strings.next, strings.last) != (numbers.first, numbers.next, numbers.last):
        raise NoTag("strings and numbers stand apart")
    types = Parameters([tool])
    name = function_of(tool)["name"]
    properties: Json = parameters.get("properties") or {}
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}

    def one(key: str, before: str) -> list[Json]:
        kinds = types.types(name, key)
        if reads is GEMMA and not kinds.isdisjoint(("array", "object")):
            raise NoTag("lists and objects are not written as JSON")
        if kinds == {"string"} and not quoted:
            return [*parts.text(before + key + strings.between), *parts.string(strings.end)]
        schema = properties[key] if isinstance(properties[key], dict) else {}
        value: Json = {"type": "json_schema", "json_schema": {**definitions, **schema}}
        if kinds == {"boolean"}:
            value = {"type": "regex", "pattern": "true|false|True|False"}  # some templates spell it as Python does
        return [*parts.text(before + key + numbers.between), value, *parts.text(numbers.end)]

    def rest(keys: Sequence[str], required: set[str]) -> list[Json]:
        found: list[Json] = []
        for key in keys:
            part = one(key, strings.next)
            found += part if key in required else [{"type": "optional", "content": parts.joined(*part)}]
        return found

    required = {key for key in parameters.get("required") or [] if key in properties}
    keys = sorted(properties, key=lambda key: key not in required)  # required ones first
    last = parts.text(strings.last)
    if required:
        return [*one(keys[0], strings.first), *rest(keys[1:], required), *last]
    if len(keys) > MAX_OPTIONAL:
        raise NoTag("too many optional parameters")
    choices = [parts.joined(*parts.text(write({})))]
    choices += [
        parts.joined(*one(key, strings.first), *rest(keys[at + 1 :], required), *last) for at, key in enumerate(keys)
    ]
    return [{"type": "or", "elements": choices}] if keys else choices


def _skeleton(written: str, values: Sequence[str]) -> _Skeleton:
    places = [written.find(part) for part in (_KEYS[0], values[0], _KEYS[1], values[1])]
    if -1 in places or sorted(places) != places:
        raise NoTag("keys and values stand in another order")
    first, between, inner, again, tail = re.split("|".join(map(re.escape, (*_KEYS, *values))), written)
    if between != again:
        raise NoTag("parameters are not written alike")
    end = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(inner, tail, strict=False)))
    return _Skeleton(first, between, end, inner[len(end) :], tail[len(end) :])


def marked_text(ids: Sequence[int], alphabet: Alphabet, decode: Callable[[Sequence[int]], str], stops: set[int]) -> str:
    """Decode ids up to the first stop token, with letters for markers."""
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    text: list[str] = []
    start = 0
    for at in range(end):
        if (letter := alphabet.letters.get(ids[at])) is not None:
            text += [decode(ids[start:at]), letter]
            start = at + 1
    return "".join([*text, decode(ids[start:end])])
