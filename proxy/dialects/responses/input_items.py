"""Converts input items of the Responses API to messages in the shape of Chat Completions.

One answer comes back as several items (reasoning, a message, function calls): consecutive items of the assistant are
joined to the message that was sampled.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from agentrl.domain.schemas import UNREAD, Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.responses.input_types import (
    ITEMS,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    Message,
    OutputText,
    Reasoning,
    Refusal,
)
from agentrl.proxy.dialects.responses.response_tools import joined
from agentrl.proxy.dialects.tool_results import Results


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. It is base64 only: the reasoning need not be hidden from its own agent."""
    return base64.b64encode(reasoning.encode()).decode()


def messages_of(items: Sequence[Json], *, goes_on: bool = False) -> list[Json]:
    """The conversation as messages. Raises RequestError 400 that names the place of an invalid item.

    With `goes_on` the items continue an earlier response, and may hold results of its calls.
    """
    messages: list[Json] = []
    results = Results()
    for i, raw in enumerate(items):
        at = f"input[{i}]"
        match _item(raw, at):
            case Message(role="assistant", content=content):
                turn = _turn(messages)
                turn["content"] = (turn["content"] or "") + _text(content)
            case Message(role=role, content=content):
                messages.append({"role": role, "content": _text(content)})
            case Reasoning() as item:
                turn = _turn(messages)
                if text := _reasoning(item, at):
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case FunctionCall(call_id=call_id, arguments=arguments) as item:
                function = {"name": joined(item.namespace, item.name), "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
                results.call(call_id)
            case FunctionCallOutput(call_id=call_id, output=output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(output)})
                results.result(call_id, f"{at}.call_id")
    if not goes_on:
        results.check()
    return messages


def _turn(messages: list[Json]) -> Json:
    """The assistant message that the next item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: str | Sequence[InputText | OutputText | Refusal | InputImage | InputFile]) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content))


def _part_text(part: InputText | OutputText | Refusal | InputImage | InputFile) -> str:
    match part:
        case Refusal(refusal=text) | InputText(text=text) | OutputText(text=text):
            return text
        case InputImage() | InputFile():
            return UNREAD


def _reasoning(item: Reasoning, at: str) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except ValueError as error:
        raise _refused(f"{at}.encrypted_content", "is not from this proxy") from error


def _item(raw: Json, at: str) -> Item:
    """One item. A null field is absent; an item without a type is a message."""
    present = {"type": "message"} | {name: value for name, value in raw.items() if value is not None}
    try:
        item: Item = msgspec.convert(present, Item)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), at) from error
    return item


def _invalid(message: str, at: str) -> RequestError:
    """msgspec's message (`Expected …, got … - at `$.field``) as an error that names the place."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`")
    if what.startswith("Invalid value") and path.endswith(".type"):
        kind, place = what.removeprefix("Invalid value "), at + path.removesuffix(".type")
        if place == at:
            return _refused(place, f"items of type {kind} are not supported; choose from {ITEMS}")
        return _refused(place, f"parts of type {kind} are not supported, only text")
    if what.startswith("Object contains unknown field"):
        return _refused(f"{at}{path}.{what.split('`')[1]}", "this field is not supported")
    return _refused(at + path, f"{what[0].lower()}{what[1:]}")


def _refused(at: str, why: str) -> RequestError:
    return RequestError(400, f"{at}: {why}", code="invalid_messages", param=at)
