"""Refuses prompts that cannot fit into the model's context, by their length, before they are rendered and encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.rendering import Renderer
from agentrl.rendering.messages import text_of

PIECE = 64 * 1024
END_OF_REASONING = "</think>"
"""The end of an answer's reasoning. Templates may leave out the text before it."""


def written(messages: Sequence[Json]) -> int:
    """About how many characters the messages have, in texts and in arguments of tool calls."""
    calls = (call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or ())
    arguments = sum(len(text) for text in calls if isinstance(text, str))
    return arguments + sum(len(text_of(message)) for message in messages)


def check(asked: ModelRequest, renderer: Renderer) -> None:
    """Raises RequestError 400 for a prompt that is longer than any that the context can hold."""
    if asked.prompts:
        for prompt in asked.prompts:
            if not isinstance(prompt, str):
                _check_ids(len(prompt), renderer.max_context)
            else:
                _check_texts([prompt], renderer, "prompt")
    else:
        _check_texts(list(map(_kept, asked.messages)), renderer, "messages")


def _kept(message: Json) -> str:
    """The part of a message's text that every template renders."""
    text = text_of(message)
    return text.rpartition(END_OF_REASONING)[2] if message["role"] == "assistant" else text


def _check_texts(texts: Sequence[str], renderer: Renderer, param: str) -> None:
    if renderer.max_chars is None or sum(map(len, texts)) <= renderer.max_chars:
        return
    found = 0
    for piece in _pieces(texts):
        found += sum(map(len, piece.split()))
        if found > renderer.max_chars:
            needed = f"this call has at least {found} characters, of which {renderer.max_chars} fit at most"
            raise _too_long(renderer.max_context, needed, param)


def _pieces(texts: Sequence[str]) -> Iterator[str]:
    """The texts in small pieces: other threads can run between them, and no long text is copied as a whole."""
    return (text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE))


def _check_ids(found: int, max_context: int | None) -> None:
    if max_context is not None and found >= max_context:
        raise _too_long(max_context, f"this call needs {found} prompt tokens", "prompt")


def _too_long(max_context: int | None, needed: str, param: str) -> RequestError:
    message = f"This model's maximum context length is {max_context} tokens; {needed}"
    return RequestError(400, message, code="context_length_exceeded", param=param)
