"""Content blocks of Anthropic's Messages as messages in Chat Completions' shape, and an answer as content blocks.

One answer is one message of ours, also where an agent sends it back as several: neighbours on the assistant's side
become one message again. Tool results become messages of their own, in the order of the blocks; text blocks that
follow each other are one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from agentrl.errors import RequestError
from agentrl.proxy.dialects.tool_results import Results
from agentrl.schemas import Json

Name = Annotated[str, Meta(min_length=1)]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class _Typed(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


class CacheControl(_Typed, tag="ephemeral"):
    """Accepted everywhere, and without effect: the engine caches every prefix."""

    ttl: str | None = None


class _Cached(_Typed):
    cache_control: CacheControl | None = None


class Text(_Cached, tag="text", kw_only=True):
    text: str
    citations: Nothing | None = None
    parsed_output: Any = None  # of the SDK's own parsing


class Thinking(_Typed, tag="thinking"):
    thinking: str
    signature: str | None = None  # ours signs nothing


class RedactedThinking(_Typed, tag="redacted_thinking"):
    data: str  # of another model: nobody here can read it


class DirectCaller(_Typed, tag="direct"):
    pass


class ToolUse(_Cached, tag="tool_use", kw_only=True):
    id: Name
    name: Name
    input: msgspec.Raw  # kept as it is written
    caller: DirectCaller | None = None


class ToolResult(_Cached, tag="tool_result", kw_only=True):
    tool_use_id: Name
    content: str | list[Text] | None = None
    is_error: bool | None = None  # the text says it: chat templates have no place for it


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="role"):
    pass


class UserMessage(_Message, tag="user"):
    content: str | list[Text | ToolResult]


class AssistantMessage(_Message, tag="assistant"):
    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class SystemMessage(_Message, tag="system"):
    content: str | list[Text]


Message = UserMessage | AssistantMessage | SystemMessage


def chat_messages(system: str | list[Text] | None, messages: Sequence[Message]) -> list[Json]:
    """The conversation in Chat Completions' shape. Raises RequestError 400 naming the place of what cannot be."""
    found: list[Json] = []
    if instructions := text_of(system):
        found.append({"role": "system", "content": instructions})
    for i, message in enumerate(messages):
        match message:
            case UserMessage(content=content):
                found += _of_user(content)
            case AssistantMessage(content=content):
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                _add(found[-1], content, f"messages[{i}].content")
            case SystemMessage(content=content):
                found.append({"role": "system", "content": text_of(content)})
    _check_results(messages)
    return found


def _check_results(messages: Sequence[Message]) -> None:
    """Raises RequestError 400 for a result of no call."""
    results = Results()
    for i, message in enumerate(messages):
        for j, block in enumerate(() if isinstance(message.content, str) else message.content):
            if isinstance(block, ToolUse):
                results.call(block.id)
            elif isinstance(block, ToolResult):
                results.result(block.tool_use_id, f"messages[{i}].content[{j}].tool_use_id")
    results.check()


def text_of(content: str | Sequence[Text] | None) -> str:
    """Text blocks joined as they are."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or [])


def content_blocks(message: Json, *, thinking: bool = True) -> list[Json]:
    """The blocks of an answer: thinking, text, tool calls; an empty text where there is nothing.

    Without `thinking` the block is there, but empty.
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
    """Arguments as the text of a JSON object: as the model wrote them, or, where they are none, inside of one."""
    if not arguments.strip():
        return "{}"
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return arguments if is_object else orjson.dumps({"arguments": arguments}).decode()


def _of_user(content: str | Sequence[Text | ToolResult]) -> Iterator[Json]:
    """Results of tools, each a message, and the texts between them."""
    if isinstance(content, str):
        content = [Text(text=content)]
    texts: list[Text] = []
    for block in content:
        if isinstance(block, Text):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": text_of(texts)}
            texts = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
    if texts or not content:
        yield {"role": "user", "content": text_of(texts)}


def _add(turn: Json, content: str | Sequence[Text | Thinking | RedactedThinking | ToolUse], at: str) -> None:
    """Add blocks to the message of the assistant that they are a part of."""
    if isinstance(content, str):
        content = [Text(text=content)]
    for i, block in enumerate(content):
        match block:
            case Text(text=text):
                turn["content"] = (turn["content"] or "") + text
            case Thinking(thinking=thinking):
                if thinking:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
            case ToolUse(id=call_id, name=name, input=value):
                function = {"name": name, "arguments": _arguments(value, f"{at}[{i}].input")}
                turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _arguments(value: msgspec.Raw, at: str) -> str:
    written = bytes(value)
    if not written.startswith(b"{"):
        raise RequestError(400, f"{at}: must be an object", code="invalid_messages", param=at)
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        raise RequestError(400, f"{at}: is not valid UTF-8: {error}", code="invalid_json", param=at) from error
