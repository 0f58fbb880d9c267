"""Encodes an answer as content blocks of Messages."""

from __future__ import annotations

import orjson

from agentrl.domain.schemas import Json


def content_blocks(message: Json, *, thinking: bool = True) -> list[Json]:
    """The blocks of an answer: thinking, text, tool calls; an empty answer has one empty text block.

    Without `thinking` the thinking block is empty.
    """
    blocks: list[Json] = []
    if (reasoning := message.get("reasoning_content")) is not None:
        blocks.append({"type": "thinking", "thinking": reasoning if thinking else "", "signature": ""})
    calls = message.get("tool_calls") or []
    if message["content"] or not (blocks or calls):
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        arguments = orjson.Fragment(object_text(function["arguments"]))
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def object_text(arguments: str) -> str:
    """Arguments as the text of a JSON object: unchanged if they are one, else as its `arguments` field."""
    if not arguments.strip():
        return "{}"
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return arguments if is_object else orjson.dumps({"arguments": arguments}).decode()
