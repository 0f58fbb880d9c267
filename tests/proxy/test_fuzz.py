"""Hostile requests and hostile answers, over HTTP, in every dialect.

Whatever comes: no 500, no hang, a response in the dialect's grammar, every intent closed, every delivered answer in the
store with its ids, and nothing that the audit complains about.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from sqlalchemy import text
from thoroughness import examples

from agentrl.store.audit import run_audit
from agentrl.testing import Reply

fuzzed = partial(
    settings,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
HELLO = {"role": "user", "content": "abcd"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FUNCTION = {"name": "calc", "description": "reckon", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
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
PIECES = ["calc(ab)", "calc(", "calc(ab", ")", "abcd", ".", "<tool_call>", "</tool_call>", '{"x": "a', "<think>", "\n"]
REFUSED = (400, 403, 404, 409, 413)
EXAMPLES = examples(30)
PLACE = b"@@HERE@@"
RESPONSE_EVENT = TypeAdapter(openai.types.responses.ResponseStreamEvent)
MESSAGE_EVENT = TypeAdapter(anthropic.types.RawMessageStreamEvent)


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


class Fuzz:
    """Sends requests and judges what comes back."""

    def __init__(self, proxy):
        self.proxy = proxy
        self.renew()

    def renew(self):
        """Go on in a new session."""
        self.session = self.proxy.session(sampling={"temperature": 1.0})

    def send(self, path, body, headers=None):
        """The response, its intents closed; 499 stands for a connection that broke in the middle of a stream."""
        bearer = {"Authorization": f"Bearer {self.session['api_key']}", "Content-Type": "application/json"}
        answer = self.proxy.http.post(
            self.session["base_url"] + path, content=body, headers=bearer | (headers or {}), timeout=20
        )
        with self.proxy.database.read() as conn:
            running = conn.execute(text("SELECT count(*) FROM interactions WHERE status = 'running'")).scalar_one()
        assert running == 0, "a call was left running"
        return answer

    def well(self, path, answer):
        """The answer is in the dialect's grammar; returns whether it is one, and no error."""
        if answer.status_code != 200:
            check_error(path, answer.json())
            return False
        if answer.headers["content-type"].startswith("text/event-stream"):
            return STREAMS[path](events_of(answer.content))
        WHOLE[path](answer.json())
        return True

    def done(self):
        with self.proxy.database.read() as conn:
            assert list(run_audit.scan(conn, self.proxy.run_id)) == []


@pytest.fixture
def fuzz(proxy):
    proxy.http = httpx.Client(timeout=120)
    found = Fuzz(proxy)
    yield found
    found.done()
    proxy.http.close()


def check_error(path, body):
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith("/messages"):
        assert body["type"] == "error"
        assert isinstance(error["type"], str)
    else:
        assert set(error) == {"message", "type", "param", "code"}


def events_of(stream):
    """(name, data) of a server-sent stream that ends with a whole event."""
    assert stream.endswith(b"\n\n"), stream[-200:]
    found = []
    for event in stream[:-2].split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        assert set(fields) <= {b"event", b"data"}
        data = fields[b"data"]
        found.append((fields.get(b"event", b"").decode(), data.decode() if data == b"[DONE]" else json.loads(data)))
    return found


def stream_of_chunks(kind, events):
    """Chunks of Chat Completions or Completions: one finish per choice and [DONE], or an error at the end."""
    *chunks, (_, last) = events
    finished = []
    for _, chunk in chunks:
        choices = chunk["choices"]
        if kind is openai.types.Completion:  # a finish reason may be missing only in streams, which the type forgets
            choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in choices]
        kind.model_validate(chunk | {"choices": choices})
        finished += [choice["index"] for choice in chunk["choices"] if choice["finish_reason"] is not None]
    if last != "[DONE]":
        check_error("/chat/completions", last)
        return False
    assert sorted(finished) == list(range(len(finished)))
    assert finished
    return True


def stream_of_responses(events):
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    open_items = set()
    for name, data in events:
        RESPONSE_EVENT.validate_python(data)
        assert name == data["type"]
        if name == "response.output_item.added":
            open_items.add(data["output_index"])
        if name == "response.output_item.done":
            open_items.remove(data["output_index"])
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    if names[-1] == "error":
        assert names[-2] == "response.failed"
        return False
    assert names[-1] in ("response.completed", "response.incomplete")
    assert not open_items
    return True


def stream_of_messages(events):
    names = [name for name, _ in events]
    assert names[0] == "message_start"
    open_block, count = None, 0
    for name, data in events:
        assert name == data["type"]
        if name == "error":
            check_error("/messages", data)
            assert names[-1] == "error"
            return False
        MESSAGE_EVENT.validate_python(data)
        if name == "content_block_start":
            assert (open_block, data["index"]) == (None, count)
            open_block, count = count, count + 1
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert open_block is None
    assert names[-2:] == ["message_delta", "message_stop"]
    return True


STREAMS: dict[str, Callable[[Any], bool]] = {
    "/chat/completions": partial(stream_of_chunks, openai.types.chat.ChatCompletionChunk),
    "/completions": partial(stream_of_chunks, openai.types.Completion),
    "/responses": stream_of_responses,
    "/messages": stream_of_messages,
}
WHOLE: dict[str, Callable[[Any], object]] = {
    "/chat/completions": openai.types.chat.ChatCompletion.model_validate,
    "/completions": openai.types.Completion.model_validate,
    "/responses": openai.types.responses.Response.model_validate,
    "/messages": anthropic.types.Message.model_validate,
    "/messages/count_tokens": anthropic.types.MessageTokensCount.model_validate,
}


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


@st.composite
def replies(draw, proxy):
    """What an engine may say: any ids, special ones and markup included, in any pieces, broken off anywhere."""
    vocabulary = proxy.renderer.vocab_size
    pieces = st.one_of(
        st.lists(st.integers(0, vocabulary - 1), max_size=6),
        st.lists(st.integers(0, 8), max_size=3),
        st.sampled_from(PIECES).map(lambda piece: proxy.says(piece, end=False)),
    )
    ids = [token for piece in draw(st.lists(pieces, max_size=5)) for token in piece]
    ids += draw(st.sampled_from([[], proxy.renderer.stop_token_ids[:1]]))
    faults: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.builds(dict, status=st.sampled_from([400, 422, 500, 503]), error=st.sampled_from(["no", "", "\0é"])),
        st.builds(dict, error=st.sampled_from(["too long", ""])),
        st.builds(dict, omit=st.sampled_from([frozenset({name}) for name in OMITTED])),
    )
    fault = draw(st.none() | faults) if draw(st.booleans()) else None
    return Reply(
        ids,
        chunks=draw(st.none() | st.lists(st.integers(1, 4), max_size=8)),
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        **(fault or {}),
    ), fault is not None


OMITTED = ("output_ids", "output_token_logprobs", "weight_versions", "finish_reason")
ASKED = {
    "/chat/completions": {"messages": [HELLO], "tools": [TOOL], "max_tokens": 50},
    "/completions": {"prompt": "abcd", "max_tokens": 50},
    "/responses": {"input": "abcd", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 50},
    "/messages": {
        "model": "test",
        "messages": [HELLO],
        "tools": [{"name": "calc", "input_schema": SCHEMA}],
        "max_tokens": 50,
    },
}
STOP = {"/chat/completions": "stop", "/completions": "stop", "/messages": "stop_sequences"}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.searches
def test_an_odd_engine_answer_is_delivered_or_fails_in_the_dialects_shape(fuzz, path):
    proxy = fuzz.proxy

    @fuzzed(max_examples=EXAMPLES)
    @given(data=st.data())
    def examine(data):
        reply, faulty = data.draw(replies(proxy))
        body = ASKED[path] | {"stream": data.draw(st.booleans())}
        if path in STOP and data.draw(st.booleans()):
            body[STOP[path]] = ["b", "calc"]
        fuzz.renew()
        proxy.engine._replies.clear()
        proxy.engine.enqueue(reply)
        answer = fuzz.send(path, json.dumps(body))
        assert answer.status_code in (200, 400, 502, 503) if faulty else answer.status_code == 200, answer.text
        answered = fuzz.well(path, answer)
        assert answered or faulty, answer.text
        (call,) = proxy.calls(fuzz.session)
        assert call["status"] == ("complete" if answered else "failed")
        if answered and not faulty:
            assert call["output_ids"] == list(reply.ids)[:50]
        if answered:
            assert (
                len(call["logprobs"])
                == len(call["output_ids"])
                == sum(end - start for _, start, end in call["version_spans"])
            )

    examine()
