"""Calls in JSON lists, Python's syntax and Gemma's syntax: what is a call, and what stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.rendering.messages import MAX_DEPTH
from agentrl.rendering.parsing.alphabet import Alphabet
from agentrl.rendering.parsing.call_readers import CallReader, Found, Items
from agentrl.rendering.parsing.list_readers import GemmaReader
from agentrl.rendering.parsing.output_formats import GEMMA, LFM, LLAMA, LLAMA4, MISTRAL, Format
from agentrl.rendering.parsing.typed_values import Parameters

from ..conftest import byte_tokenizer, tool

PARAMETERS = Parameters([tool("f", k="string"), tool("g")])
F = '{"name": "f", "parameters": {"k": "v"}}'


def reader_of(format: Format) -> tuple[CallReader, Alphabet]:
    markers = (*format.markers, *format.atoms)
    alphabet = Alphabet(byte_tokenizer(markers=markers), markers)
    return format.reader(alphabet), alphabet


def read(format: Format, body: str) -> Items | None:
    """The calls of a reply in which each marker is one token."""
    reader, alphabet = reader_of(format)
    return reader.read(alphabet.marked(body), PARAMETERS)


def arguments(items: Items | None) -> Any:
    """The arguments of the only call."""
    assert items is not None
    (call,) = items
    assert isinstance(call, Found)
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (F, [Found("f", '{"k": "v"}')]),
        (' {"name": "g", "arguments": {}}\n', [Found("g", "{}")]),
        ('{"name": "g"}', [Found("g", "{}")]),
        (f'{F};\n{{"name": "g", "parameters": {{}}}}', [Found("f", '{"k": "v"}'), Found("g", "{}")]),
        (f"{F}<|python_tag|>{F}", [Found("f", '{"k": "v"}')] * 2),
        (f"{F} and more", [Found("f", '{"k": "v"}'), " and more"]),
        (f'{F};{{"name": "unknown"}}', [Found("f", '{"k": "v"}'), ';{"name": "unknown"}']),
        ('{"name": "unknown", "parameters": {}}', None),
        ('{"name": "f", "parameters": [1]}', None),
        ('{"name": "f", "parameters": {"k": 1e999}}', None),
        ('{"name": "f", "parameters": {', None),
        ('["f"]', None),
        ("f", None),
        ("", None),
    ],
)
def test_llama_calls_are_json_objects_that_name_tools_of_the_request(body: str, expected: Items | None) -> None:
    assert read(LLAMA, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (F, [Found("f", '{"k": "v"}')]),
        ('[f(k="v"), g()]', [Found("f", '{"k": "v"}'), Found("g", "{}")]),
        ('[f(k="v"), unknown()]', None),
        ("[1, 2]", None),
        ("[]", None),
    ],
)
def test_llama_4_also_writes_calls_as_python_does(body: str, expected: Items | None) -> None:
    assert read(LLAMA4, body) == expected


@pytest.mark.parametrize("format", [LLAMA, LLAMA4, MISTRAL], ids=lambda format: format.name)
def test_a_call_that_extends_to_the_end_of_the_reply_has_no_marker_in_a_value(format: Format) -> None:
    reader, _ = reader_of(format)
    assert not reader.goes_on('{"name": "f", "parameters": {"k": "')


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("True", True),
        ("true", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("-3", -3),
        ("-2.5", -2.5),
        ("1e3", 1000.0),
        ("'a' \"b\"", "ab"),
        ("[1, [None, 'x']]", [1, [None, "x"]]),
        ("{'a': {'b': -1}}", {"a": {"b": -1}}),
    ],
)
def test_a_value_of_python_that_json_has_is_an_argument(value: str, expected: Any) -> None:
    assert arguments(read(LFM, f"[f(k={value})]")) == {"k": expected}


@pytest.mark.parametrize(
    "value",
    [
        "1e999",
        "-1e999",
        "-True",
        "-'a'",
        "+1",
        "1j",
        "b'a'",
        "...",
        "name",
        "(1, 2)",
        "{1: 2}",
        "{**a}",
        "{'a'}",
        "g()",
        "1 + 1",
        r"'\ud800'",
        "0x" + "f" * 5000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "-" * 50_000 + "1",
    ],
    ids=lambda value: value[:12],
)
def test_a_value_that_json_does_not_have_is_no_argument(value: str) -> None:
    assert read(LFM, f"[f(k={value})]") is None


@pytest.mark.parametrize(
    "body",
    ["f(k=1)", "[f(1)]", "[f(k=1, k=2)]", "[f(**a)]", "[f]", "[f()()]", "[f(k=1]", "[f(k=1)] and more", "\0[f()]"],
)
def test_python_that_is_no_list_of_calls_with_named_arguments_is_text(body: str) -> None:
    assert read(LFM, body) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('[{"name": "f", "arguments": {"k": "v"}}]', [Found("f", '{"k": "v"}')]),
        (' [{"name": "f", "arguments": "{}", "id": "a1"}] more', [Found("f", "{}", "a1"), " more"]),
        ('[{"name": "f", "arguments": {}}, 1]', None),
        ("[]", None),
        ('[{"name": "f"', None),
        ('f[ARGS]{"k": "v"}', [Found("f", '{"k": "v"}')]),
        ("f[CALL_ID]a1[ARGS]{}", [Found("f", "{}", "a1")]),
        ("f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", [Found("f", "{}"), Found("g", "{}")]),
        ("f[ARGS]{} more", [Found("f", "{}"), " more"]),
        ("f[ARGS][1]", None),
        ("f[ARGS]{", None),
        ("f[ARGS]", None),
        ("<f>[ARGS]{}", None),
        ("f{}", None),
    ],
)
def test_mistral_calls_are_a_list_or_a_name_with_its_arguments(body: str, expected: Items | None) -> None:
    assert read(MISTRAL, body) == expected


@pytest.mark.parametrize("value", ["[TOOL_CALLS]", r"[TOOL_CALLS] \u00e9"])
def test_a_marker_in_a_string_of_mistrals_arguments_is_text_of_the_string(value: str) -> None:
    assert arguments(read(MISTRAL, f'f[ARGS]{{"k": "{value}"}}')) == {"k": json.loads(f'"{value}"')}


def test_text_behind_mistrals_last_call_begins_behind_that_call() -> None:
    reader, alphabet = reader_of(MISTRAL)
    body = alphabet.marked("f[ARGS]{}[TOOL_CALLS]g[ARGS]{")
    found = reader.read(body, PARAMETERS)
    assert found is not None
    assert [item if isinstance(item, Found) else alphabet.spelled(item) for item in found] == [
        Found("f", "{}"),
        "[TOOL_CALLS]g[ARGS]{",
    ]


def quoted(text: str) -> str:
    return text.replace('"', GemmaReader.QUOTE)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("call:f{}", {}),
        ('call:f{k:"v, {w}"}', {"k": "v, {w}"}),
        ('call:f{"a b":1, c : true}', {"a b": 1, "c": True}),
        ("call:f{a:null,b:None,c:NaN,d:two words}", {"a": None, "b": None, "c": "NaN", "d": "two words"}),
        ('call:f{a:[],b:[1, "x", {c:[2]}]}', {"a": [], "b": [1, "x", {"c": [2]}]}),
        (" \ncall:f{a:-1.5} \n", {"a": -1.5}),
    ],
)
def test_gemma_writes_keys_without_quotes_and_strings_between_markers(body: str, expected: Any) -> None:
    assert arguments(read(GEMMA, quoted(body))) == expected


@pytest.mark.parametrize(
    "body",
    [
        "f{}",
        "call:<f>{}",
        "call:f[1]",
        "call:f{} more",
        "call:f{",
        "call:f{a:}",
        "call:f{a: }",
        "call:f{a:1",
        'call:f{a:"x}',
        'call:f{a:"x"b:1}',
        'call:f{a:["x"1]}',
        'call:f{"a"}',
        "call:f{:1}",
        "call:f{ :1}",
        "call:f{a:1,a:2}",
        "call:f{a:[,1]}",
        "call:f{a:" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
    ],
    ids=lambda body: body[:24],
)
def test_a_call_of_gemma_that_is_cut_or_malformed_is_text(body: str) -> None:
    assert read(GEMMA, quoted(body)) is None


@pytest.mark.parametrize(("body", "goes_on"), [('call:f{k:"a', True), ('call:f{k:"a"', False), ("call:f{", False)])
def test_a_marker_stands_in_a_value_of_gemma_between_quotes(body: str, goes_on: bool) -> None:
    reader, alphabet = reader_of(GEMMA)
    assert reader.goes_on(alphabet.marked(quoted(body))) is goes_on
