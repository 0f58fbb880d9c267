"""What libraries do at their first use, done once before the processes are forked.

The first call of an OpenAI client reads the types of requests and answers, and the first tool compiles patterns for
docstrings. Without this, each process would do so in its first episode, all of them at the same moment.
"""

from __future__ import annotations

import sys
from typing import Any

import httpx

from agentrl.rollout.http import agent_http

MESSAGE = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "sample", "arguments": "{}"}}],
}
ANSWER = {
    "id": "first-use",
    "object": "chat.completion",
    "created": 0,
    "model": "default",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "tool_calls", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
FUNCTION = {"name": "sample", "description": "One.", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


async def use_once(timeout_s: float) -> None:
    """Use the libraries that an imported agent has imported."""
    async with agent_http(timeout_s):
        pass
    if "openai" in sys.modules:
        await _call_once()
    if "agentrl.rollout.tools.tool_signature" in sys.modules:
        from agentrl.rollout.tools.tool_signature import ToolSignature

        assert ToolSignature(_sample, "sample", is_method=False).schema


async def _call_once() -> None:
    """Make a call whose answer comes from here."""
    from openai import AsyncOpenAI

    here = httpx.MockTransport(lambda request: httpx.Response(200, json=ANSWER))
    async with httpx.AsyncClient(transport=here) as http:
        client = AsyncOpenAI(base_url="http://here", api_key="none", http_client=http)
        told = {"role": "tool", "tool_call_id": "1", "content": "."}
        messages: Any = [{"role": "system", "content": "."}, {"role": "user", "content": "."}, MESSAGE, told]
        await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)


def _sample(number: int) -> str:
    """Return a number.

    Args:
        number: What to return.
    """
    return str(number)
