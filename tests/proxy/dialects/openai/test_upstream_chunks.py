"""Upstream answers in Chat Completions and Completions: what the proxy reads from a chunk or a whole completion."""

import pytest

from agentrl.proxy.dialects.openai.upstream_chunks import read_chunk
from agentrl.proxy.dialects.upstream_event import UpstreamEvent


@pytest.mark.parametrize(
    ("data", "event"),
    [
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, UpstreamEvent()),
        ({"choices": [{"delta": {}, "finish_reason": "length"}]}, UpstreamEvent(finish_reason="length")),
        ({"choices": [{"finish_reason": None}, {"finish_reason": "stop"}]}, UpstreamEvent(finish_reason="stop")),
        ({"choices": [{"text": "a", "finish_reason": "stop"}]}, UpstreamEvent(finish_reason="stop")),
        ({"choices": [{"finish_reason": 7}, "text"]}, UpstreamEvent()),
        ({"choices": None}, UpstreamEvent()),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, UpstreamEvent(begins_tool_call=True)),
        ({"choices": [{"delta": {"tool_calls": []}}, {"delta": None}]}, UpstreamEvent()),
        ({"choices": [], "usage": {"completion_tokens": 7}}, UpstreamEvent(output_tokens=7)),
        ({"usage": {"completion_tokens": "7"}}, UpstreamEvent()),
        ({"usage": {"output_tokens": 7}}, UpstreamEvent()),
        ({"usage": None}, UpstreamEvent()),
        ({"error": {"message": "no"}}, UpstreamEvent(error='{"error":{"message":"no"}}')),
        ({"error": None}, UpstreamEvent()),
        ("[DONE]", UpstreamEvent(finish_reason="stop", is_last=True)),
        ("text", UpstreamEvent()),
        ([1], UpstreamEvent()),
    ],
)
def test_a_chunk_is_read(data, event):
    assert read_chunk(data) == event
