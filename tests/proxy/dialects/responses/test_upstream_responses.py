"""Upstream answers in Responses: what the proxy reads from an event or a whole response."""

import pytest

from agentrl.proxy.dialects.responses.upstream_responses import read_response_event
from agentrl.proxy.dialects.upstream_event import UpstreamEvent

FAILED = {"type": "response.failed", "response": {"status": "failed"}}


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (
            {"object": "response", "status": "completed", "usage": {"output_tokens": 3}},
            UpstreamEvent(finish_reason="completed", output_tokens=3),
        ),
        ({"object": "response", "status": "in_progress"}, UpstreamEvent()),
        ({"object": "response", "status": ["completed"]}, UpstreamEvent()),
        ({"type": "response.created", "response": {"status": "in_progress"}}, UpstreamEvent()),
        ({"type": "response.output_item.added", "item": {"type": "message"}}, UpstreamEvent()),
        ({"type": "response.output_item.done", "item": {"type": "function_call"}}, UpstreamEvent()),
        (
            {"type": "response.output_item.added", "item": {"type": "function_call"}},
            UpstreamEvent(begins_tool_call=True),
        ),
        (
            {"type": "response.output_item.added", "item": {"type": "custom_tool_call"}},
            UpstreamEvent(begins_tool_call=True),
        ),
        (
            {"type": "response.completed", "response": {"status": "completed", "usage": {"output_tokens": 3}}},
            UpstreamEvent(finish_reason="completed", is_last=True, output_tokens=3),
        ),
        (
            {"type": "response.incomplete", "response": {"status": "incomplete"}},
            UpstreamEvent(finish_reason="incomplete", is_last=True),
        ),
        ({"type": "response.completed"}, UpstreamEvent(finish_reason="stop", is_last=True)),
        (
            FAILED,
            UpstreamEvent(error='{"type":"response.failed","response":{"status":"failed"}}', is_last=True),
        ),
        ({"type": "error", "message": "no"}, UpstreamEvent(error='{"type":"error","message":"no"}')),
        ("text", UpstreamEvent()),
    ],
)
def test_an_event_is_read(data, event):
    assert read_response_event(data) == event
