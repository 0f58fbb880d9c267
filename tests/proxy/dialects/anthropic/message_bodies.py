"""Requests of Anthropic Messages, decoded, and parts of their bodies."""

import json

from agentrl.proxy.dialects.anthropic.messages_dialect import AnthropicMessages

DIALECT = AnthropicMessages()
HI = {"role": "user", "content": "hi"}
CALC = {"name": "calc", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
BLOCK = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://images/1"}}
PDF = {"type": "base64", "data": "", "media_type": "application/pdf"}
REFERENCE = {"type": "tool_reference", "tool_name": "notes"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def decode(**fields):
    return DIALECT.decode(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode())


def user(*blocks):
    return [HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": list(blocks)}]
