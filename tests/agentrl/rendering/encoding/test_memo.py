"""Caches of rendered and encoded texts: they return equal conversations only, within a capacity."""

from __future__ import annotations

from typing import Any

from agentrl.rendering.encoding.memo import LONG_TEXT, EncodedTexts, RenderedTexts

HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def test_the_cache_returns_a_text_for_equal_messages_and_tools_only() -> None:
    texts = RenderedTexts()
    texts.put([HI], None, "hi!")
    assert texts.get([dict(HI)], None) == texts.get([HI], []) == "hi!"
    assert texts.get([HI], [TOOL]) is None
    assert texts.get([HI, HI], None) is None
    assert texts.get([], None) is None
    texts.put([{"role": "system", "content": "a"}, HI], None, "a")
    assert texts.get([{"role": "system", "content": "b"}, HI], None) is None


def test_the_cache_evicts_the_oldest_texts_first() -> None:
    texts = RenderedTexts(capacity=8)
    conversations = [[{"role": "user", "content": str(i)}] for i in range(3)]
    for messages in conversations:
        texts.put(messages, None, "1234")
    assert [texts.get(messages, None) for messages in conversations] == [None, "1234", "1234"]
    texts.put(conversations[1], None, "12345678")
    assert [texts.get(messages, None) for messages in conversations] == [None, "12345678", None]
    texts.put([HI], None, "too long for it")
    assert texts.get([HI], None) is None


def test_long_texts_are_encoded_once_while_they_fit() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [ord(text[0])]

    texts = EncodedTexts(encode, capacity=2 * LONG_TEXT)
    a, b, c = (letter * LONG_TEXT for letter in "abc")
    assert [texts(text) for text in (a, b, a, "short", "short", c, a, b)] == [[ord(letter)] for letter in "abasscab"]
    assert asked == [a, b, "short", "short", c, b]  # of two, the one that was used last stays
