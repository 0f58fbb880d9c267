"""Checks tool results: refuses a result without a call, and replaces parts that are not text with a fixed text.

An agent's own tool may answer with an image (Claude Code's `Read`, Codex's `view_image`), even for a text-only model.
The fixed text says that there was an attachment. Attachments in users' messages are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.domain.schemas import UNREAD
from agentrl.errors import RequestError

ATTACHMENTS = ("image_url", "image", "input_audio", "file")
"""Types of content parts other than text in Chat Completions; some clients send `image`."""


class Results:
    """A conversation's tool calls and their results, in order.

    Results before the first call are accepted: a truncated history may begin with them.
    """

    def __init__(self) -> None:
        self._called: set[str] = set()
        self._placed: list[tuple[str, str]] = []

    def call(self, call_id: str) -> None:
        """Note a tool call of the assistant."""
        self._called.add(call_id)

    def result(self, call_id: str, at: str) -> None:
        """Note a tool's result; `at` is the place of the id."""
        if self._called:
            self._placed.append((call_id, at))

    def check(self) -> None:
        """Raise RequestError 400 for a result whose id belongs to no call of the conversation."""
        for call_id, at in self._placed:
            if call_id not in self._called:
                message = f"{at}: no tool call before it has the id {call_id!r}"
                raise RequestError(400, message, code="invalid_messages", param=at)


def text_only(messages: Sequence[Any]) -> list[Any]:
    """Messages of Chat Completions, with `schemas.UNREAD` in place of attachments in tool results."""
    return [_text_only(message) for message in messages]


def _text_only(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool" or not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_read(part) for part in message["content"]]}


def _read(part: Any) -> Any:
    unread = isinstance(part, dict) and part.get("type") in ATTACHMENTS
    return {"type": "text", "text": UNREAD} if unread else part
