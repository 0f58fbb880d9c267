"""Encodes a recorded conversation as input items of the Responses API, the inverse of `input_items`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.domain.schemas import Json
from agentrl.proxy.dialects.responses.output_items import PREFIXES
from agentrl.proxy.dialects.responses.response_tools import caller_name
from agentrl.rendering.messages import text_of


def items_of(messages: Sequence[Json], call_id: str, tools: Sequence[Json]) -> list[Json]:
    """The items of messages in the shape of Chat Completions; their ids are made from the id of their call.

    The response's `tools` have the namespaces of its functions.
    """
    items = (item for message in messages for item in _items(message, tools))
    return [
        item | {"id": f"{PREFIXES[item['type']]}_{call_id}_in{place}", "status": "completed"}
        for place, item in enumerate(items)
    ]


def _items(message: Json, tools: Sequence[Json]) -> Iterator[Json]:
    role, text = message["role"], text_of(message)
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        return
    if reasoning := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]}
    calls = message.get("tool_calls") or []
    if text or not calls:
        yield {"type": "message", "role": role, "content": [{"type": "output_text", "text": text, "annotations": []}]}
    for call in calls:
        name = caller_name(tools, call["function"]["name"])
        yield {"type": "function_call", "call_id": call["id"], **call["function"], **name}
