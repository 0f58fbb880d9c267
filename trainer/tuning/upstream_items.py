"""Makes items from what an upstream answered in a run: text, encoded for the model that is tuned.

An answer is trained once, after the conversation that the upstream got. Answers of one session are one item, so that
what they share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from agentrl.configs.tuning_config import SftDataConfig
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rendering import Renderer
from agentrl.store.training.paths.upstream_answers import UpstreamAnswer
from agentrl.trainer.packing import Sample
from agentrl.trainer.tuning.encoding import encode
from agentrl.trainer.tuning.items import Item

CHAT = "openai.chat"
"""The dialect whose answers are read."""


def items(renderer: Renderer, found: Sequence[UpstreamAnswer], data: SftDataConfig, notes: list[str]) -> list[Item]:
    """An item for each chosen session with answers that can be read. Adds to `notes` how many answers were left out.

    Raises UserError, which names the call, for an answer that the model's chat format cannot write.
    """
    made: list[Item] = []
    readable = [(one, message) for one in found if (message := message_of(one)) is not None]
    if len(readable) < len(found):
        notes.append(f"left out {len(found) - len(readable)} answers that are no complete messages of Chat Completions")
    for _, members in groupby(readable, key=lambda pair: pair[0].group_id):
        sessions = [list(calls) for _, calls in groupby(members, key=lambda pair: pair[0].session_id)]
        best = sorted(sessions, key=lambda calls: -calls[0][0].reward)[: data.best_of_group]  # stable
        chosen = [calls for calls in best if data.min_reward is None or calls[0][0].reward >= data.min_reward]
        made += [[s for one, message in calls for s in _encoded(renderer, one, message)] for calls in chosen]
    return made


def _encoded(renderer: Renderer, one: UpstreamAnswer, message: Json) -> list[Sample]:
    try:
        samples = encode(renderer, [*one.messages, message], one.tools, first=len(one.messages), name=one.call_id)
    except UserError as error:
        raise UserError(f"data.upstream: call {one.call_id}: {error}") from None
    return [replace(s, tokens=replace(s.tokens, group_id=one.session_id, episode_return=one.reward)) for s in samples]


def message_of(one: UpstreamAnswer) -> Json | None:
    """The message of a complete answer to a chat; None for one that was cut, refused, or is in another dialect."""
    if one.dialect != CHAT:
        return None
    events = one.answer.get("events")
    choices = _streamed(events) if isinstance(events, list) else one.answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("finish_reason") not in ("stop", "tool_calls"):
        return None
    message = choice.get("message")
    kept = ("role", "content", "reasoning_content", "tool_calls")
    if not isinstance(message, dict) or not (message.get("content") or message.get("tool_calls")):
        return None
    return {"role": "assistant"} | {name: message[name] for name in kept if message.get(name) is not None}


def _streamed(events: Sequence[Any]) -> list[Json]:
    """The first choice of a stream, as an answer without a stream has it."""
    message: Json = {"role": "assistant"}
    calls: dict[int, Json] = {}
    finish = None
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        choice = next((c for c in choices or [] if isinstance(c, dict) and not c.get("index")), {})
        delta = _object(choice.get("delta"))
        finish = choice.get("finish_reason") or finish
        for name in ("content", "reasoning_content"):
            if isinstance(delta.get(name), str):
                message[name] = message.get(name, "") + delta[name]
        for part in map(_object, delta.get("tool_calls") or []):
            call = calls.setdefault(
                part.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}}
            )
            call |= {"id": part["id"]} if part.get("id") else {}
            for name, text in _object(part.get("function")).items():
                if isinstance(text, str):
                    call["function"][name] = call["function"].get(name, "") + text
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return [{"message": message, "finish_reason": finish}]


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
