"""Validates grammars before an engine compiles them: limits on JSON schemas, regular expressions and structural tags.

An engine compiles grammars in a pool without cancellation, and a grammar that accepts no token produces NaN. Within
these limits SGLang's compiler (xgrammar) finishes in seconds. The measured cost drivers are:

    properties of one object, times its minProperties or maxProperties     quadratic in states
    different bounds on the length of strings                              about a second each
    depth                                                                  cubic

Schemas are also validated against the meta-schema of their draft, and their references must resolve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import orjson

MAX_BYTES = 256 * 1024
"""Size of a grammar."""
MAX_DEPTH = 64
"""Levels of JSON. A schema within `properties` is two levels down."""
MAX_SCHEMAS = 4096
MAX_PROPERTIES = 256
"""Properties of one object."""
MAX_COUNTED = 4096
"""Properties of one object, times its `minProperties` or `maxProperties`."""
MAX_ENUM = 1024
"""Values over all enums."""
MAX_VALUE = 4096
"""Characters of an enum value or constant."""
MAX_TEXT = 64 * 1024
"""Characters of all property names, enums and constants together."""
MAX_LENGTH = 10_000
"""Maximum of `minLength`, `maxItems` and similar keywords."""
MAX_STRING_LENGTHS = 8
"""Different pairs of `minLength` and `maxLength`."""
MAX_NUMBER = 2**53
"""Maximum absolute value of `minimum`, `maximum` and similar keywords."""
MAX_PATTERN = 512
"""Characters of a pattern."""
MAX_PATTERNS = 32
MAX_REPEATS = 1000
"""Sum of all counts (`{2,5}`) in a pattern."""

MEMO = 64
"""Number of accepted grammars to cache."""

_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SAME_PLACE = ("allOf", "anyOf", "oneOf")
_LISTS = (*_SAME_PLACE, "prefixItems", "items")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties", "dependencies")
_LENGTHS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMA_OF_TAG = ("json_schema", "schema")
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_DRAFTS = (
    "json-schema.org/draft-04",
    "json-schema.org/draft-06",
    "json-schema.org/draft-07",
    "json-schema.org/draft/2019-09",
    "json-schema.org/draft/2020-12",
)


class GrammarRefused(ValueError):
    """An invalid grammar, or one beyond the limits. The message starts with the location."""


@dataclass(slots=True)
class _Tally:
    """Totals over all schemas of a grammar."""

    schemas: int = 0
    enum: int = 0
    text: int = 0
    patterns: int = 0
    string_lengths: set[tuple[Any, Any]] = field(default_factory=set)


@lru_cache(maxsize=MEMO)
def check_json_schema(text: str) -> None:
    """Validate a JSON schema. Raises GrammarRefused. Cached, since agents repeat a schema with each call."""
    _check_bytes("a schema", text)
    schema = orjson.loads(text)
    _check_depth(schema)
    _check_schema(schema, _Tally())


def check_regex(regex: str) -> None:
    """Check the length of a generated regular expression. Raises GrammarRefused."""
    _check_bytes("a regular expression", regex)


@lru_cache(maxsize=MEMO)
def check_structural_tag(text: str) -> None:
    """Validate a structural tag and its schemas. Raises GrammarRefused."""
    _check_bytes("a structural tag", text)
    tally = _Tally()
    for schema in _schemas(orjson.loads(text)):
        _check_depth(schema)
        _check_schema(schema, tally)


def _schemas(tag: Any) -> Iterator[Any]:
    """The schemas in a structural tag."""
    stack = [tag]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from (item[name] for name in _SCHEMA_OF_TAG if isinstance(item.get(name), dict | bool))
            stack += [below for name, below in item.items() if name not in _SCHEMA_OF_TAG]
        elif isinstance(item, list):
            stack += item


def _check_bytes(what: str, text: str) -> None:
    if (size := len(text.encode())) > MAX_BYTES:
        raise GrammarRefused(f"{what} of {size} bytes: at most {MAX_BYTES} are taken")


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for item in level
            if isinstance(item, dict | list)
            for below in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise GrammarRefused(f"a schema that is nested more than {MAX_DEPTH} levels deep")


def _check_schema(root: Any, tally: _Tally) -> None:
    _check_meta(root)
    places: dict[int, str] = {}
    stands_for: dict[int, list[int]] = {}  # schemas that apply to the same value, by identity
    stack = [("", root)]
    while stack:
        at, schema = stack.pop()
        if id(schema) in places or not isinstance(schema, dict):
            continue
        places[id(schema)] = at
        tally.schemas += 1
        if tally.schemas > MAX_SCHEMAS:
            raise GrammarRefused(f"more than {MAX_SCHEMAS} schemas in one")
        _check_bounds(at, schema, tally)
        stack += _below(at, schema)
        same = [below for name in _SAME_PLACE for below in schema.get(name, ())]
        if (ref := schema.get("$ref")) is not None:
            target = _resolve(root, ref, at)
            stack.append((ref, target))
            same.append(target)
        stands_for[id(schema)] = [id(below) for below in same if isinstance(below, dict)]
    try:
        TopologicalSorter(stands_for).prepare()
    except CycleError as error:
        at = places[error.args[1][0]]
        raise GrammarRefused(_placed(at, "a reference that leads back to itself before any value has begun")) from error


def _check_meta(schema: Any) -> None:
    """Validate against the meta-schema; an unknown draft is treated as the newest. Raises GrammarRefused."""
    if not isinstance(schema, dict | bool):
        raise GrammarRefused("a schema must be an object")
    if isinstance(schema, dict) and not any(draft in str(schema.get("$schema")) for draft in _DRAFTS):
        schema = {name: value for name, value in schema.items() if name != "$schema"}
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
        raise GrammarRefused(_placed(at.lstrip("."), f"is not a valid JSON schema: {error.message[:200]}")) from error


def _check_bounds(at: str, schema: dict[str, Any], tally: _Tally) -> None:
    """Check the limits of one schema, without its subschemas."""
    names = len(schema.get("properties", ()))
    if names > MAX_PROPERTIES:
        raise GrammarRefused(_placed(at, f"{names} properties: at most {MAX_PROPERTIES} are taken"))
    counted = names * max(schema.get("minProperties", 0), schema.get("maxProperties", 0))
    if counted > MAX_COUNTED:
        raise GrammarRefused(
            _placed(at, f"{names} properties times minProperties or maxProperties: at most {MAX_COUNTED} are taken")
        )
    for name in _LENGTHS:
        if schema.get(name, 0) > MAX_LENGTH:
            raise GrammarRefused(_placed(at, f"{name} must be at most {MAX_LENGTH}"))
    for name in _NUMBERS:
        if not isinstance(value := schema.get(name, 0), bool) and abs(value) > MAX_NUMBER:
            raise GrammarRefused(_placed(at, f"{name} must be from -2^53 to 2^53"))
    tally.enum += len(schema.get("enum", ()))
    if tally.enum > MAX_ENUM:
        raise GrammarRefused(_placed(at, f"more than {MAX_ENUM} values of enums"))
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    lengths = [len(orjson.dumps(value)) for value in values]
    if max(lengths, default=0) > MAX_VALUE:
        raise GrammarRefused(_placed(at, f"a value of {max(lengths)} characters: at most {MAX_VALUE} are taken"))
    tally.text += sum(lengths) + sum(map(len, schema.get("properties", ())))
    if tally.text > MAX_TEXT:
        raise GrammarRefused(_placed(at, f"more than {MAX_TEXT} characters of names, enums and constants"))
    if "minLength" in schema or "maxLength" in schema:
        tally.string_lengths.add((schema.get("minLength"), schema.get("maxLength")))
    if len(tally.string_lengths) > MAX_STRING_LENGTHS:
        raise GrammarRefused(
            _placed(at, f"more than {MAX_STRING_LENGTHS} different pairs of minLength and maxLength; make some alike")
        )
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if pattern:
            _check_pattern(at, pattern, tally)


def _check_pattern(at: str, pattern: str, tally: _Tally) -> None:
    tally.patterns += 1
    if tally.patterns > MAX_PATTERNS:
        raise GrammarRefused(_placed(at, f"more than {MAX_PATTERNS} patterns"))
    if len(pattern) > MAX_PATTERN:
        raise GrammarRefused(_placed(at, f"a pattern of {len(pattern)} characters: at most {MAX_PATTERN} are taken"))
    counts = [int(count) for found in _REPEAT.findall(pattern) for count in found if count]
    if sum(counts) > MAX_REPEATS:
        raise GrammarRefused(_placed(at, f"the counts of a pattern's repeats add up to more than {MAX_REPEATS}"))


def _below(at: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct subschemas of a schema, each with its location."""
    for name in _ONE:
        yield _join(at, name), schema.get(name)
    for name in _LISTS:
        if isinstance(items := schema.get(name), list):
            yield from ((f"{_join(at, name)}[{i}]", item) for i, item in enumerate(items))
    for name in _MAPS:
        if isinstance(members := schema.get(name), dict):
            yield from ((_join(_join(at, name), key), member) for key, member in members.items())


def _resolve(root: Any, ref: Any, at: str) -> Any:
    """The target of a reference. Raises GrammarRefused when it is external or missing."""
    if ref == "#":
        return root
    if not str(ref).startswith("#/"):
        raise GrammarRefused(_placed(at, f"$ref must be # or begin with #/, got {str(ref)[:100]!r}"))
    found = root
    for part in str(ref)[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isascii() and key.isdecimal() and len(key) < 6 and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            found = None
    if not isinstance(found, dict | bool):
        raise GrammarRefused(_placed(at, f"$ref {str(ref)[:100]!r} names no schema"))
    return found


def _join(at: str, name: str) -> str:
    return f"{at}.{name[:100]}" if at else name[:100]


def _placed(at: str, message: str) -> str:
    return f"{at[:300]}: {message}" if at else message
