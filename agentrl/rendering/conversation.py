"""Identifies a conversation by canonical messages, and by a hash that is chained over them.

An agent sends the whole conversation with every call, re-serialised by its SDK. The parent of a call is found by
hashing canonical messages one by one: `root_key`, then `chain_key` for every message. Two spellings that mean the same
have the same key; two conversations that differ have different ones. The rules:

- content: a string, a list of text parts, and their concatenation are equal; so are null, "", [] and no content;
- fields that are null do not count, nor do fields that no model sees (`refusal`, `annotations`, `index`, …);
- `developer` is `system`; the `name` of a user or system message counts, the `name` of other roles does not;
- tool calls: id, name, and arguments as parsed JSON (white space, key order, `1.0` for `1` are spelling); arguments
  that are not JSON count as text; missing arguments are `{}`. A tool message counts with its `tool_call_id`. Ids are
  unique per interaction, which distinguishes conversations with equal texts;
- reasoning never counts: most SDKs drop it.

Keys are BLAKE3 digests of 16 bytes over the previous key and the message's canonical JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import orjson
from blake3 import blake3

from agentrl.domain.schemas import Json
from agentrl.rendering.messages import function_of, parse_arguments, role_of

KEY_BYTES = 16


def canonical(message: Json) -> Json:
    """The canonical form of a message, equal for equivalent spellings. Accepts any JSON object with a role."""
    role = role_of(message)
    plain: Json = {"role": role}
    if content := _content(message.get("content")):
        plain["content"] = content
    if role in ("user", "system") and message.get("name"):
        plain["name"] = message["name"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def root_key(tools: Sequence[Json] | None, template_options: Json | None = None) -> bytes:
    """The key of the empty conversation: tools and template options."""
    return _root_key(_dump({"tools": list(tools or []), "options": template_options or {}}))


@lru_cache(maxsize=1024)
def _root_key(spelled: bytes) -> bytes:
    return _digest(b"", _value(json.loads(spelled)))


def chain_key(prefix_key: bytes, message: Json) -> bytes:
    """The key of the conversation `prefix_key` plus one message."""
    return _digest(prefix_key, canonical(message))


def chain_keys(root: bytes, messages: Iterable[Json]) -> list[bytes]:
    """The keys of all prefixes of a conversation."""
    keys: list[bytes] = []
    for message in messages:
        keys.append(chain_key(keys[-1] if keys else root, message))
    return keys


def _digest(prefix: bytes, value: Json) -> bytes:
    # The prefix has one of two fixed lengths and JSON starts with "{", so no two inputs run into each other.
    return blake3(prefix + _dump(value)).digest(KEY_BYTES)


def _dump(value: Json) -> bytes:
    """JSON with sorted keys; `json` serializes values that orjson cannot."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _content(content: Any) -> Any:
    """Join text parts; a list with other parts stays a list, without nulls."""
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(texts) if len(texts) == len(content) else _value(content)


def _tool_call(call: Json) -> Json:
    function = function_of(call)
    arguments = parse_arguments(function.get("arguments"))
    # A JSON string and text that is not JSON are different things.
    kind = "text" if isinstance(arguments, str) and arguments == function["arguments"] else "json"
    return {"id": call.get("id"), "name": function["name"], kind: _value(arguments)}


def _value(value: Any) -> Any:
    """Normalize JSON: no nulls in objects, and 1 equals 1.0."""
    match value:
        case dict():
            return {key: _value(item) for key, item in value.items() if item is not None}
        case list():
            return [_value(item) for item in value]
        case float() if not math.isfinite(value):
            return f"\0{value}"  # JSON has no NaN and no infinity
        case float() if value.is_integer():
            return int(value)
    return value
