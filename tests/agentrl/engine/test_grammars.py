"""Which grammars an engine is sent: none that it compiles for minutes, none that accepts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from agentrl.engine.grammars import GrammarRefused, check_json_schema, check_regex, check_structural_tag

STRING = {"type": "string"}


def named(count: int, **more: Any) -> Any:
    return {"type": "object", "properties": {f"p{i}": STRING for i in range(count)}, **more}


def deep(levels: int) -> Any:
    schema: Any = STRING
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def check(schema: Any) -> None:
    check_json_schema(orjson.dumps(schema).decode())


GOOD = [
    {},
    named(256),
    deep(31),
    {"enum": list(range(1024))},
    {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": STRING}},
    {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
    {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
    {"$schema": "https://example.com/ours", "type": "object"},
    {"type": "string", "pattern": "^[a-z]{1,100}$", "maxLength": 200},
    {"properties": {"pattern": STRING, "$ref": STRING, "enum": STRING, "maxLength": STRING}},
]

BAD = {
    "object": [1],
    "not valid under any": {"type": "nonsense"},
    "properties.a.minLength": {"properties": {"a": {"minLength": "x"}}},
    "leads back to itself": {"$ref": "#"},
    "leads back": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "before any value has begun": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    "begin with #/": {"$ref": "http://127.0.0.1:9/secret"},
    "names no schema": {"$ref": "#/$defs/none"},
    "257 properties": named(257),
    "minProperties or maxProperties": named(200, minProperties=100),
    "1024 values": {"anyOf": [{"enum": list(range(600))}, {"enum": list(range(600))}]},
    "64 levels": deep(40),
    "maxLength must be": {"maxLength": 10**9},
    "items.maxItems": {"items": {"maxItems": "x"}},
    "minItems must be": {"minItems": 10_001},
    "different pairs": {"properties": {f"p{i}": {"maxLength": i} for i in range(9)}},
    "maximum must be": {"maximum": 1e300},
    "513 characters": {"pattern": "a" * 513},
    "repeats": {"items": {"pattern": "(a{1,600}){1,600}"}},
    "patternProperties|patterns": {"patternProperties": {"x" * i: STRING for i in range(1, 34)}},
    "bytes": {"description": "x" * 300_000},
    "a value of 4097": {"anyOf": [{"const": "x" * 4094}, {"enum": ["x" * 4095]}]},
    "characters of names": {"properties": {f"{i}" + "x" * 300: STRING for i in range(250)}},
    "schemas in one": {"anyOf": [{"type": "null"}] * 4097},
}


@pytest.mark.parametrize("schema", GOOD)
def test_a_schema_within_the_bounds_is_taken(schema: Any) -> None:
    check(schema)


@pytest.mark.parametrize("why", BAD)
def test_an_invalid_or_too_large_schema_is_refused(why: str) -> None:
    with pytest.raises(GrammarRefused, match=why):
        check(BAD[why])


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (check_regex, "a" * 300_000),
        (check_structural_tag, '{"type": "tag", "content": "' + "a" * 300_000 + '"}'),
        (check_structural_tag, '{"tags": [{"content": {"type": "json_schema", "json_schema": {"$ref": "#"}}}]}'),
        (check_structural_tag, '{"structures": [{"begin": "<a>", "schema": {"maxLength": 1000000}}]}'),
    ],
)
def test_other_grammars_have_the_same_bounds(grammar: Callable[[str], None], text: str) -> None:
    with pytest.raises(GrammarRefused):
        grammar(text)


def test_the_bounds_hold_for_all_schemas_of_a_tag_together() -> None:
    one = {"type": "json_schema", "json_schema": {"enum": list(range(600))}}
    check_structural_tag(orjson.dumps({"tags": [{"content": one}]}).decode())
    with pytest.raises(GrammarRefused, match="1024 values"):
        check_structural_tag(orjson.dumps({"tags": [{"content": one}, {"content": one}]}).decode())
