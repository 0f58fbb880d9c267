"""Messages as attributes of a span: JSON of bounded size, in the shape that the GenAI conventions give messages.

    {"role": "user", "parts": [{"type": "text", "content": "…"}]}

Parts are kept in order until the size is used up; the text that crosses it is cut, and what follows is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from agentrl.domain.schemas import Json
from agentrl.export.spans.span_parts import CUT, JsonText

FRAME_BYTES = 48
"""Bytes of a part or a message beside its text."""


class _Room:
    """The bytes that are left for the texts of one attribute."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, value: str) -> str | None:
        """As much of a text as fits; None when nothing more does."""
        if self.left <= FRAME_BYTES:
            return None
        clean = value.encode(errors="replace").replace(b"\0", "\ufffd".encode())
        self.left -= FRAME_BYTES
        kept = clean[: self.left]
        self.left -= len(kept)
        return kept.decode(errors="ignore") + (CUT if len(kept) < len(clean) else "")


def instructions(system: Iterable[Any], size: int) -> JsonText | None:
    """The texts of system messages."""
    room = _Room(size)
    parts = [part for message in system for part in _parts(message, room)]
    return _json(parts)


def messages(given: Iterable[Any], size: int, finish_reason: str | None = None) -> JsonText | None:
    """Messages in Chat Completions' shape, or of another API; answers have a finish reason."""
    room = _Room(size)
    found: list[Json] = []
    for message in given:
        parts = list(_parts(message, room))
        if not parts:
            continue
        role = message.get("role") if isinstance(message, dict) else None
        of_answer = {} if finish_reason is None else {"finish_reason": finish_reason}
        found.append({"role": role if isinstance(role, str) else "user", "parts": parts, **of_answer})
    return _json(found)


def answers(answer: Any) -> list[Any]:
    """The messages of a call's answer: the policy's message, or the answer of another model as its server gave it."""
    if not isinstance(answer, dict) or "content" in answer or "tool_calls" in answer:
        return [] if answer is None else [answer]
    choices = answer.get("choices")
    if isinstance(choices, list) and all(isinstance(choice, dict) and "message" in choice for choice in choices):
        return [choice["message"] for choice in choices]
    return [{"role": "assistant", "content": answer}] if answer else []


def _parts(message: Any, room: _Room) -> Iterator[Json]:
    """The parts of a message that fit into the room."""
    if not isinstance(message, dict):
        message = {"content": message}
    if isinstance(thought := message.get("reasoning_content"), str) and thought:
        yield from _text("reasoning", "content", thought, room)
    if message.get("role") == "tool":
        more = {"id": str(message.get("tool_call_id", ""))[:200]}
        yield from _text("tool_call_response", "response", _plain(message.get("content")), room, more)
        return
    content = message.get("content")
    if content:
        yield from _text("text", "content", _plain(content), room)
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            more = {"id": str(call.get("id", ""))[:200], "name": str(function.get("name", ""))[:200]}
            yield from _text("tool_call", "arguments", _plain(function.get("arguments")), room, more)


def _text(kind: str, key: str, value: str, room: _Room, more: Json | None = None) -> Iterator[Json]:
    kept = room.take(value)
    if kept is not None:
        yield {"type": kind, **(more or {}), key: kept}


def _plain(content: Any) -> str:
    """The text of a message's content; content that is not text as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(one, str) for one in texts):
            return "".join(map(str, texts))
    return "" if content is None else orjson.dumps(content).decode()


def _json(value: list[Json]) -> JsonText | None:
    return JsonText(orjson.dumps(value).decode()) if value else None
