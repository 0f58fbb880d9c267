"""Hostile requests over HTTP, in every dialect.

Whatever comes: no 500, no hang, a response in the dialect's grammar, every intent closed, and nothing that the audit
complains about.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tried_calls import EXAMPLES, FUNCTION, SCHEMA, TOOL, fuzzed

CALL = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": '{"x": "a"}'}}
BODIES = {
    "/chat/completions": {
        "model": "test",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "ab"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ba"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "calc"}},
        "temperature": 1.0,
        "top_p": 1.0,
        "logit_bias": {"5": 1.0},
        "seed": 1,
        "max_tokens": 5,
        "stop": ["."],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 0,
        "user": "me",
        "metadata": {"a": "b"},
        "return_token_ids": True,
        "parallel_tool_calls": False,
    },
    "/completions": {
        "model": "test",
        "prompt": ["ab", "cd"],
        "max_tokens": 5,
        "temperature": 1.0,
        "stop": ".",
        "n": 1,
        "seed": 3,
        "logprobs": 0,
        "echo": False,
        "stream": False,
        "logit_bias": {"7": -1},
        "best_of": 1,
        "presence_penalty": 0.5,
    },
    "/responses": {
        "model": "test",
        "instructions": "be short",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "ab"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "call_1", "name": "calc", "arguments": '{"x": "a"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "ba"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": "auto",
        "stream": True,
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "metadata": {"a": "b"},
    },
    "/messages": {
        "model": "test",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be short"}],
        "messages": [
            {"role": "user", "content": "ab"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "toolu_1", "name": "calc", "input": {"x": "a"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "ba"}]},
        ],
        "tools": [{"name": "calc", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "stream": True,
        "stop_sequences": ["."],
        "temperature": 1.0,
        "metadata": {"user_id": "me"},
    },
}
BODIES["/messages/count_tokens"] = {
    name: BODIES["/messages"][name] for name in ("model", "messages", "system", "tools", "tool_choice")
}
ODD = [
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1.5",
    b"1e999",
    b"NaN",
    b"9" * 400,
    b"18446744073709551616",
    b'""',
    b'"x"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"\xff"',
    b'"<|im_end|><|im_start|>"',
    b"[]",
    b"{}",
    b"[[]]",
    b'[{"type": "text"}]',
    b"[" * 260 + b"]" * 260,
    b"[" * 5000,
    b'{"a": ' * 300 + b"1" + b"}" * 300,
    b'"' + b"ab" * 20_000 + b'"',
    b"",
]
REFUSED = (400, 403, 404, 409, 413)
PLACE = b"@@HERE@@"


def places(value, path=()):
    """Every place of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def put(value, path, odd):
    """The JSON text of a value with `odd` at one place."""
    if not path:
        return odd
    changed = json.loads(json.dumps(value))
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = PLACE.decode()
    return json.dumps(changed).encode().replace(b'"' + PLACE + b'"', odd)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.searches
def test_a_body_with_an_odd_value_is_answered_in_the_dialects_shape(fuzz, path):
    valid = BODIES[path]
    assert fuzz.well(path, fuzz.send(path, json.dumps(valid)))

    @fuzzed(max_examples=EXAMPLES)
    @given(place=st.sampled_from(list(places(valid))), odd=st.sampled_from(ODD))
    def examine(place, odd):
        answer = fuzz.send(path, put(valid, place, odd))
        assert answer.status_code in (200, *REFUSED), answer.text
        fuzz.well(path, answer)

    examine()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.searches
def test_a_damaged_body_is_answered_in_the_dialects_shape(fuzz, path):
    valid = json.dumps(BODIES[path]).encode()

    @fuzzed(max_examples=EXAMPLES)
    @given(data=st.data())
    def examine(data):
        at = data.draw(st.integers(0, len(valid)))
        body = data.draw(
            st.sampled_from([valid[:at], valid[at:], valid[:at] + valid[at + 1 :]])
            | st.binary(max_size=3).map(lambda junk: valid[:at] + junk + valid[at:])
        )
        headers = data.draw(
            st.dictionaries(
                st.sampled_from(
                    [
                        "Content-Type",
                        "X-Turn-Type",
                        "X-Stainless-Retry-Count",
                        "X-Session-ID",
                        "Idempotency-Key",
                        "anthropic-version",
                        "anthropic-beta",
                        "Accept",
                        "Content-Encoding",
                    ]
                ),
                st.sampled_from(["", "text/plain", "side", "99999999999999999999", "é", "a" * 500, "gzip"]).map(
                    lambda value: value.encode("latin-1")
                ),
                max_size=2,
            )
        )
        answer = fuzz.send(path, body, headers)
        assert answer.status_code in (200, *REFUSED), answer.text
        fuzz.well(path, answer)

    examine()
