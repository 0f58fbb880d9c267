"""Builds what reward functions learn about an answer, from a conversation and the model's reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError


def answer_of(task: Json, messages: Sequence[Any], reply: object, **about: Any) -> Json:
    """The answer to `messages`: `reply` is a ChatCompletion of the SDK, its JSON, or the text. Raises UserError."""
    given = {"task": task, **about}
    if isinstance(reply, str):
        said: Json = {"role": "assistant", "content": reply}
        return given | {"messages": [*messages, said], "completion": reply, "reasoning": None}
    dump = getattr(reply, "model_dump", None)
    body = dump(exclude_none=True) if callable(dump) else reply
    try:
        choice = body["choices"][0]  # type: ignore[index]
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
