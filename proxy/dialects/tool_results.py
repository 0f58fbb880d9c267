"""Results of tools: a result without a call is refused, and parts that are not text are replaced by a fixed text.

An agent's own tool may answer with an image (Claude Code's `Read`, Codex's `view_image`), even for a text-only model.
The fixed text says that there was one. Attachments in users' messages are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.domain.schemas import UNREAD
from agentrl.errors import RequestError

ATTACHMENTS = ("image_url", "image", "input_audio", "file")
"""Parts of Chat Completions that are no text; some clients write `image`."""


class Results:
    """A conversation's tool calls and their results, in order.

    Results before the first call are taken as they are: histories that were cut short may begin with them.
    """

    def __init__(self) -> None:
        self._called: set[str] = set()
        self._placed: list[tuple[str, str]] = []

    def call(self, call_id: str) -> None:
        """The assistant called a tool."""
        self._called.add(call_id)

    def result(self, call_id: str, at: str) -> None:
        """A tool answered a call; `at` is the place of the id."""
        if self._called:
            self._placed.append((call_id, at))

    def check(self) -> None:
        """Raises RequestError 400 for a result with an id that no call of the conversation has."""
        for call_id, at in self._placed:
            if call_id not in self._called:
                message = f"{at}: no tool call before it has the id {call_id!r}"
                raise RequestError(400, message, code="invalid_messages", param=at)


def text_only(messages: Sequence[Any]) -> list[Any]:
    """Messages of Chat Completions, with `schemas.UNREAD` for what a tool's result holds besides text."""
    return [_text_only(message) for message in messages]


def _text_only(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool" or not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_read(part) for part in message["content"]]}


def _read(part: Any) -> Any:
    unread = isinstance(part, dict) and part.get("type") in ATTACHMENTS
    return {"type": "text", "text": UNREAD} if unread else part
