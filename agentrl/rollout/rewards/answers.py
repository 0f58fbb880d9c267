"""Builds what reward functions learn about an answer, from a conversation and the model's reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError


def answer_of(task: Json, messages: Sequence[Any], reply: object, **about: Any) -> Json:
    """The answer to `messages`: `reply` is a ChatCompletion of the SDK, its JSON, or the text. Raises UserError."""
    given, messages = {"task": task, **about}, [_plain(message) for message in messages]
    if isinstance(reply, str):
        said: Json = {"role": "assistant", "content": reply}
        return given | {"messages": [*messages, said], "completion": reply, "reasoning": None}
    body = _plain(reply)
    try:
        choice = body["choices"][0]
        said = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"the reply to score must be a chat completion or a text, got {type(reply).__name__}") from None
    assert isinstance(body, Mapping)
    return given | {
        "messages": [*messages, said],
        "completion": said.get("content") or "",
        "reasoning": said.get("reasoning_content") or said.get("reasoning"),
        "finish_reason": choice.get("finish_reason"),
        "prompt_ids": body.get("prompt_token_ids"),
        "completion_ids": choice.get("token_ids"),
    }


def _plain(value: Any) -> Any:
    """The JSON of an object of the SDK; other values as they are."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value
