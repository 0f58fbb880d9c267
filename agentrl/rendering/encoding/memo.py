"""Caches rendered and encoded texts, so that the next turn of a conversation reuses its beginning.

Both caches are limited by the characters of their texts. cachetools limits values only, and rejects a value above the
limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from agentrl.domain.schemas import Json

CAPACITY = 16_000_000
"""Characters: some hundred conversations of 30,000 tokens."""
LONG_TEXT, LONG_TEXTS = 256, 4_000_000
"""In characters: the shortest text that is cached (`units.py` caches the words of others), and the capacity."""


class EncodedTexts:
    """Caches the ids of recent long texts. Sessions share the system prompt; those of a group also share the task."""

    def __init__(self, encode: Callable[[str], list[int]], capacity: int = LONG_TEXTS) -> None:
        """`capacity` bounds the texts together, in characters."""
        self._encode = encode
        self._capacity = capacity
        self._size = 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = Lock()  # large prompts are rendered by threads

    def __call__(self, text: str) -> list[int]:
        """The ids of a text. Callers must not change the list."""
        if len(text) < LONG_TEXT:
            return self._encode(text)
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
                return ids
        ids = self._encode(text)
        with self._lock:
            if text not in self._ids:
                self._size += len(text)
            self._ids[text] = ids
            while self._size > self._capacity:
                self._size -= len(self._ids.popitem(last=False)[0])
        return ids


class RenderedTexts:
    """Caches the texts of recent prompts. A text is found only by equal messages and tools.

    Messages are kept, not copied: callers must not change them afterwards.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity` bounds the texts together, in characters."""
        self._capacity = capacity
        self._size = 0
        self._texts: OrderedDict[tuple[int, str], tuple[list[Json], list[Json], str]] = OrderedDict()
        self._lock = Lock()

    def put(self, messages: list[Json], tools: list[Json] | None, text: str) -> None:
        """Remember a text. It replaces that of a conversation with the same length and the same end."""
        key = _key(messages)
        with self._lock:
            if key in self._texts:
                self._drop(key)
            self._texts[key] = (messages, tools or [], text)
            self._size += len(text)
            while self._size > self._capacity:
                self._drop(next(iter(self._texts)))

    def get(self, messages: list[Json], tools: list[Json] | None) -> str | None:
        """The text of exactly this conversation, if it is cached."""
        known, known_tools, text = self._texts.get(_key(messages), ([], [], ""))
        return text if known and known == messages and known_tools == (tools or []) else None

    def _drop(self, key: tuple[int, str]) -> None:
        self._size -= len(self._texts.pop(key)[2])


def _key(messages: list[Json]) -> tuple[int, str]:
    return len(messages), repr(messages[-1]) if messages else ""
