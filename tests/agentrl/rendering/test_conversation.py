"""Keys of conversations: equal under everything that SDKs do to a message, different otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rendering.conversation import canonical, chain_key, chain_keys, root_key

from .conftest import call, patient, tool

ROOT = root_key(None)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4), values, max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """A message as the proxy delivered or received it, arguments as values."""
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    message: dict[str, Any] = {"role": role, "content": draw(st.text(max_size=8))}
    if role == "assistant":
        calls = st.tuples(st.sampled_from(["f", "g"]), arguments, st.sampled_from(["call_1", "call_2"]))
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": value}}
            for name, value, id in draw(st.lists(calls, max_size=2))
        ]
    if role == "tool":
        message["tool_call_id"] = draw(st.sampled_from(["call_1", "call_2"]))
    return message


@st.composite
def respelled(draw: st.DrawFn, message: dict[str, Any]) -> dict[str, Any]:
    """The same message after some SDK's round trip."""
    other = dict(message)
    text = message["content"]
    cut = draw(st.integers(0, len(text)))
    other["content"] = draw(
        st.sampled_from(
            [
                text,
                text or None,
                [{"type": "text", "text": text}],
                [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:], "annotations": None}],
            ]
        )
    )
    if other["role"] == "system":
        other["role"] = draw(st.sampled_from(["system", "developer"]))
    if "tool_calls" in message:
        indent = draw(st.sampled_from([None, 2]))
        other["tool_calls"] = [
            {
                "index": i,
                "id": item["id"],
                "type": "function",
                "function": {
                    "name": item["function"]["name"],
                    "arguments": json.dumps(
                        dict(reversed(item["function"]["arguments"].items())),
                        indent=indent,
                        ensure_ascii=draw(st.booleans()),
                    ),
                },
            }
            for i, item in enumerate(message["tool_calls"])
        ] or draw(st.sampled_from([None, []]))
        other |= {"reasoning_content": draw(st.none() | st.text(max_size=3)), "refusal": None, "annotations": []}
    return other


@patient
@given(st.data(), st.lists(messages(), max_size=4))
def test_respelled_conversations_have_the_same_keys(data: st.DataObject, conversation: list[dict[str, Any]]) -> None:
    again = [data.draw(respelled(message)) for message in conversation]
    assert chain_keys(ROOT, again) == chain_keys(ROOT, conversation)


def meaning(message: dict[str, Any]) -> Any:
    """What tells messages apart, written down independently of `canonical`."""

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return ("object", frozenset((key, value(inner)) for key, inner in item.items() if inner is not None))
        if isinstance(item, list):
            return ("list", tuple(value(inner) for inner in item))
        return ("number", item) if isinstance(item, (int, float)) and not isinstance(item, bool) else (type(item), item)

    calls = [(c["id"], c["function"]["name"], value(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return message["role"], message["content"], calls, message.get("tool_call_id")


@patient
@given(st.lists(messages(), max_size=3), st.lists(messages(), max_size=3))
def test_keys_differ_exactly_when_conversations_do(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    same = [meaning(message) for message in one] == [meaning(message) for message in two]
    assert (chain_keys(ROOT, one)[-1:] == chain_keys(ROOT, two)[-1:]) == same


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "bob"}),
        ({"role": "tool", "content": "4", "tool_call_id": "x"}, {"role": "tool", "content": "4", "tool_call_id": "y"}),
        (
            {"role": "assistant", "tool_calls": [call("f", "{}", "x")]},
            {"role": "assistant", "tool_calls": [call("f", "{}", "y")]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("f", '"a"')]},
            {"role": "assistant", "tool_calls": [call("f", "a")]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("f", '{"a": 1}')]},
            {"role": "assistant", "tool_calls": [call("f", '{"a": true}')]},
        ),
    ],
)
def test_different_messages_have_different_keys(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert chain_key(ROOT, one) != chain_key(ROOT, two)


def test_numbers_survive_a_javascript_sdk() -> None:
    python = {"role": "assistant", "tool_calls": [call("f", '{"a": 1.0, "b": [2.50]}')]}
    javascript = {"role": "assistant", "tool_calls": [call("f", '{"b":[2.5],"a":1}')]}
    assert canonical(python) == canonical(javascript)


def test_arguments_that_are_no_json_are_kept_as_text() -> None:
    for broken in ("{", "[" * 100_000, "[" * 400 + "]" * 400):
        message = {"role": "assistant", "tool_calls": [call("f", broken)]}
        assert canonical(message)["tool_calls"] == [{"id": "call_1", "name": "f", "text": broken}]
    empty = {"role": "assistant", "tool_calls": [call("f", "")]}
    assert canonical(empty) == canonical({"role": "assistant", "tool_calls": [call("f", "{}")]})


def test_tools_and_options_are_part_of_the_root() -> None:
    roots = {root_key(None), root_key([tool("f")]), root_key([tool("g")]), root_key(None, {"enable_thinking": False})}
    assert len(roots) == 4
    assert root_key([]) == root_key(None) == root_key(None, {"enable_thinking": None})
    assert all(len(key) == 16 for key in roots)


def test_a_key_is_computed_from_the_key_before_and_the_message() -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, second = chain_keys(ROOT, conversation)
    assert (first, second) == (chain_key(ROOT, conversation[0]), chain_key(first, conversation[1]))
    assert chain_keys(ROOT, conversation[:1]) == [first]


def test_numbers_that_json_cannot_spell_stay_apart() -> None:
    keys = {
        chain_key(root_key(None), {"role": "assistant", "tool_calls": [call("f", f'{{"x": {number}}}')]})
        for number in ("NaN", "Infinity", "-Infinity", "null", str(10**30), str(10**31))
    }
    assert len(keys) == 6
