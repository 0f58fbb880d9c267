"""Sends requests to a proxy, and judges that each answer is in the grammar of its dialect."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai
from hypothesis import HealthCheck, Phase, settings
from pydantic import TypeAdapter
from sqlalchemy import text
from thoroughness import examples

from agentrl.store.audit import run_audit

fuzzed = partial(
    settings,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
HELLO = {"role": "user", "content": "abcd"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FUNCTION = {"name": "calc", "description": "reckon", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
EXAMPLES = examples(30)
RESPONSE_EVENT = TypeAdapter(openai.types.responses.ResponseStreamEvent)
MESSAGE_EVENT = TypeAdapter(anthropic.types.RawMessageStreamEvent)


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
