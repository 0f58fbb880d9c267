"""Values without quotes get their type from the parameter's schema."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.rendering.parsing.typed_values import Parameters, read_json


def value(schema: Any, text: str, **root: Any) -> Any:
    """The value that `text` is for a parameter of that schema."""
    parameters = {"type": "object", "properties": {"p": schema}} | root
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return Parameters([tool]).value("f", "p", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, " 1\n", " 1\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string"]}, "true", "true"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "7.0", 7.0),
        ({"type": "integer"}, "7.5", "7.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/Word"}, "12", "12"),
        ({"$ref": "#/$defs/Missing"}, "12", 12),
        ({"$ref": "#"}, "12", 12),
        ({}, "12", 12),
        ({}, "words", "words"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        (True, "12", 12),
    ],
)
def test_a_value_has_the_type_that_its_schema_allows(schema: Any, text: str, expected: Any) -> None:
    found = value(schema, text, **{"$defs": {"Word": {"type": "string"}}})
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", '"\\ud800"', "[" * 5000, "{", ""])
def test_json_that_clients_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)
