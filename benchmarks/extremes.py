"""Makes seeded requests at the limits of every dialect: numbers, schemas, stop strings, biases, bodies. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Body = dict[str, Any]
HELLO = [{"role": "user", "content": "Count to three."}]
STRING: Body = {"type": "string"}
BASES: dict[str, Body] = {
    "/chat/completions": {"messages": HELLO, "max_tokens": 12},
    "/completions": {"prompt": "one two", "max_tokens": 12},
    "/responses": {"input": "Count to three.", "max_output_tokens": 12},
    "/messages": {"model": "default", "max_tokens": 12, "messages": HELLO},
}
NUMBERS = [
    *(0, 1, -1, 2, 0.5, 1e-6, 1e-7, 1e-30, 5e-324, 1e30, 1e308, -1e308, -0.0),
    *(2**15, 2**24, 2**30, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(-(2**31), -(2**63), 10**30, 10**400, 1.0, 20.0),
    *(True, False, None, "1", "", [], {}),
    *(float("nan"), float("inf"), float("-inf")),
]
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed", "max_tokens"]
NAMES: dict[str, list[str]] = {
    "/chat/completions": [
        *SAMPLING,
        *("max_completion_tokens", "n", "top_logprobs", "repetition_penalty", "min_tokens"),
    ],
    "/completions": [*SAMPLING, "n", "logprobs", "best_of", "length_penalty"],
    "/responses": ["temperature", "top_p", "max_output_tokens", "top_logprobs", "max_tool_calls"],
    "/messages": ["temperature", "top_p", "top_k", "max_tokens"],
}
LONG = 10_000
SHORT = ["\0", "\ufffd", "\U0010ffff", "é" * 1000, "<|im_end|>", "\u202e", " ", "a" * 1024, "\\", '"', "\n"]
TEXTS = [*SHORT, "x" * 200_000]
MAX_BYTES = 2 * 1024 * 1024
"""Largest size of a body."""


def requests(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """The path and body of `count` requests, equal for equal seeds."""
    pick = random.Random(seed)
    for _ in range(count):
        path = pick.choice([*BASES])
        body = json.loads(json.dumps(BASES[path]))
        for change in pick.choices(CHANGES, WEIGHTS, k=pick.choice((1, 1, 2, 3))):
            change(pick, path, body)
        if pick.random() < 0.3:
            body["stream"] = True
        data = json.dumps(body).encode()  # NaN and Infinity as Python writes them
        if len(data) > MAX_BYTES:
            data = json.dumps(BASES[path] | {"user": "x" * MAX_BYTES}).encode()
        yield path, _damaged(pick, data) if pick.random() < 0.05 else data


def _number(pick: random.Random, path: str, body: Body) -> None:
    body[pick.choice(NAMES[path])] = pick.choice(NUMBERS)


def _stop(pick: random.Random, path: str, body: Body) -> None:
    name = {"/messages": "stop_sequences", "/responses": "instructions"}.get(path, "stop")
    count = pick.choice((0, 1, 4, 32, 33, 500))
    body[name] = pick.choices(TEXTS if count < 5 else SHORT, k=count)


def _bias(pick: random.Random, path: str, body: Body) -> None:
    tokens = pick.choice((["9" * 5000], ["-1"], ["1e3"], ["0" * 9 + "5"], [str(i) for i in range(2000)], ["5", "6"]))
    body["logit_bias"] = {token: pick.choice((100, -100, 101, 1e308, 0, None, "1")) for token in tokens}


def _format(pick: random.Random, path: str, body: Body) -> None:
    schema = pick.choice(SCHEMAS)(pick)
    named = {"type": "json_schema", "name": "a", "schema": schema}
    match path:
        case "/responses":
            body["text"] = {"format": named}
        case "/messages":
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        case _:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _tools(pick: random.Random, path: str, body: Body) -> None:
    schema = pick.choice(SCHEMAS)(pick)
    names = [pick.choice(("f", "g" * 64, "h" * 5000, "é", "")) + str(i) for i in range(pick.choice((1, 2, 200)))]
    match path:
        case "/messages":
            body["tools"] = [{"name": name, "input_schema": schema} for name in names]
            body["tool_choice"] = {"type": pick.choice(("auto", "any", "none"))}
        case "/responses":
            body["tools"] = [{"type": "function", "name": name, "parameters": schema} for name in names]
            body["tool_choice"] = pick.choice(("auto", "required", "none"))
        case _:
            body["tools"] = [{"type": "function", "function": {"name": n, "parameters": schema}} for n in names]
            body["tool_choice"] = pick.choice(
                ("auto", "required", {"type": "function", "function": {"name": names[0]}})
            )


def _prompt(pick: random.Random, path: str, body: Body) -> None:
    text, often = pick.choice(TEXTS), pick.choice((1, 2, 300))
    many = [text] * (often if len(text) < LONG else 1)
    match path:
        case "/completions":
            body["prompt"] = pick.choice((text, many, [2**31], [-1], [0] * 5000, [], [[]]))
        case "/responses":
            body["input"] = text
        case _:
            body["messages"] = [{"role": "user", "content": text} for text in many]


def _anything(pick: random.Random, path: str, body: Body) -> None:
    body[pick.choice([*body, "user", "metadata", "custom_params", "regex", "ebnf", "lora_path", "rid"])] = pick.choice(
        [*NUMBERS, *TEXTS, {"a": "b" * 10_000}, [[[[]]]] * 100]
    )


def _named(pick: random.Random, count: int, **more: Any) -> Body:
    return {"type": "object", "properties": {f"p{pick.random()}": STRING for _ in range(count)}, **more}


def _deep(pick: random.Random) -> Body:
    schema: Body = STRING
    for _ in range(pick.choice((20, 31, 100))):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _loop(pick: random.Random) -> Body:
    ref = {"$ref": pick.choice(("#", "#/$defs/a", "http://127.0.0.1:9/x", "#/none", "#/$defs/a/$ref"))}
    inner = pick.choice((ref, {"anyOf": [ref, STRING]}, {"type": "array", "items": ref}, {"properties": {"a": ref}}))
    return {"$defs": {"a": inner}, **pick.choice((inner, {"$ref": "#/$defs/a"}))}


def _lengths(pick: random.Random) -> Body:
    bounds = [
        {**STRING, "maxLength": pick.choice((1, 10, 100, 1000, 10_000, 10**9)) + i}
        for i in range(pick.choice((1, 8, 30)))
    ]
    return {"type": "object", "properties": {f"p{i}": bound for i, bound in enumerate(bounds)}}


def _pattern(pick: random.Random) -> Body:
    patterns = [
        "((",
        "[^\\s\\S]",
        "(a{1,1000}){1,1000}",
        "[a-z]{1,999}",
        "(a|a)*b",
        "((a*)*)*$",
        "^.{1,500}$",
        "a{99999999}",
        "(?=a)b",
        "\\p{L}+",
        "[" + "é" * 500 + "]",
        "x" * 2000,
        "(a?){30}a{30}",
        "\\u0000",
        "",
    ]
    return {**STRING, "pattern": pick.choice(patterns)}


def _range(pick: random.Random) -> Body:
    kind = pick.choice(("integer", "number"))
    numbers = [value for value in NUMBERS if isinstance(value, int | float) and value is not True]
    return {"type": kind, "minimum": pick.choice(numbers), "maximum": pick.choice(numbers)}


SCHEMAS: list[Callable[[random.Random], Any]] = [
    lambda pick: _named(pick, pick.choice((1, 30, 256, 257, 2000))),
    lambda pick: _named(pick, pick.choice((10, 60, 256)), minProperties=pick.choice((1, 30, 200))),
    lambda pick: {"enum": [str(pick.random()) for _ in range(pick.choice((1, 1000, 5000)))]},
    lambda pick: {"enum": pick.choice(([], [None], [{}], ["x" * 100_000], [1e308, "\0"]))},
    lambda pick: {"type": pick.choice(("nonsense", [], ["string"] * 9, None, 5)), "minLength": -1},
    lambda pick: {"type": "array", "minItems": pick.choice((5, 10_000, 10**9)), "maxItems": pick.choice((2, 10**12))},
    lambda pick: {"anyOf": [_named(pick, 1, required=["zz"]) for _ in range(pick.choice((0, 2, 500)))]},
    lambda pick: pick.choice(NUMBERS),
    _deep,
    _loop,
    _lengths,
    _pattern,
    _range,
]
CHANGES = [_number, _stop, _bias, _format, _tools, _prompt, _anything]
WEIGHTS = [8, 2, 2, 5, 2, 2, 2]


def _damaged(pick: random.Random, data: bytes) -> bytes:
    at = pick.randrange(len(data))
    return pick.choice(
        (
            data[:at],
            data[:at] + b"\xff" + data[at:],
            data.replace(b"Count", b"\\ud800"),
            b"",
            b"[" * 5000,
            b'{"a":' * 2000,
            b"null",
            b"[]",
            data + b"}",
            b'"' + b"a" * 1_000_000 + b'"',
            data + b" " * 1_000_000,
        )
    )
