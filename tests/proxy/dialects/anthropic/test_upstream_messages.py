"""Upstream answers in Messages: what the proxy reads from an event or a whole message."""

import pytest

from agentrl.proxy.dialects.anthropic.upstream_messages import read_message_event
from agentrl.proxy.dialects.upstream_event import UpstreamEvent

OVERLOADED = {"type": "error", "error": {"type": "overloaded_error"}}


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (
            {"type": "message", "stop_reason": "end_turn", "usage": {"output_tokens": 3}},
            UpstreamEvent(finish_reason="end_turn", output_tokens=3),
        ),
        (
            {"type": "message_start", "message": {"stop_reason": None, "usage": {"output_tokens": 1}}},
            UpstreamEvent(output_tokens=1),
        ),
        ({"type": "content_block_start", "content_block": {"type": "text"}}, UpstreamEvent()),
        (
            {"type": "content_block_start", "content_block": {"type": "tool_use"}},
            UpstreamEvent(begins_tool_call=True),
        ),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, UpstreamEvent()),
        (
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 9}},
            UpstreamEvent(finish_reason="max_tokens", output_tokens=9),
        ),
        ({"type": "message_delta", "delta": {"stop_reason": None}}, UpstreamEvent()),
        ({"type": "message_stop"}, UpstreamEvent(finish_reason="stop", is_last=True)),
        (OVERLOADED, UpstreamEvent(error='{"type":"error","error":{"type":"overloaded_error"}}')),
        ({"usage": {"output_tokens": [3]}}, UpstreamEvent()),
        ("text", UpstreamEvent()),
    ],
)
def test_an_event_is_read(data, event):
    assert read_message_event(data) == event
