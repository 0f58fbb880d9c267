"""Server-sent events: where they end, however the stream is cut, and what their payload is."""

import asyncio

import pytest

from agentrl.proxy.calls.upstreams.server_sent_events import data_of, split_events

EVENTS = [b'data: {"a": 1}\n\n', b"event: x\r\ndata: b\r\n\r\n", b": bye\n\n", b"data: cut"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_are_split_wherever_the_chunks_end(size):
    sent = b"".join(EVENTS)

    async def chunks():
        for start in range(0, len(sent), size):
            yield sent[start : start + size]

    async def split():
        return [event async for event in split_events(chunks())]

    assert asyncio.run(split()) == EVENTS


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"a": 1}\n\n', {"a": 1}),
        (b'data:{"a":\r\ndata: 1}\r\n\r\n', {"a": 1}),
        (b"data: [DONE]\n\n", "[DONE]"),
        (b"data: \xff\n\n", "\ufffd"),
        (b": comment\n\n", None),
        (b"data: " + b"[" * 300 + b"]" * 300 + b"\n\n", "[" * 300 + "]" * 300),
    ],
    ids=["json", "several lines", "text", "not UTF-8", "no data", "nested too deeply"],
)
def test_the_payload_of_an_event(event, data):
    assert data_of(event) == data
