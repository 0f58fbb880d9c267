"""Outputs as an agent meets them: parsed in pieces, sent back, followed up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from agentrl.rendering import Delta, ParsedOutput, Renderer
from agentrl.rendering.renderer import gather


def parse(
    renderer: Renderer, tools: list[dict[str, Any]], prompt: list[int], ids: Sequence[int], cuts: Sequence[int] = ()
) -> tuple[ParsedOutput, list[Delta]]:
    """The message that `ids`, pushed in pieces, are, and every delta of it."""
    parser = renderer.parser(tools, prompt)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    deltas = [delta for a, b in pairwise(bounds) for delta in parser.push(ids[a:b])]
    parsed = parser.finish()
    return parsed, deltas + parsed.deltas


def shown(parsed: ParsedOutput) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """What a message says, ids of tool calls aside: every parse makes new ones."""
    return parsed.content, parsed.reasoning, [(found.name, found.arguments) for found in parsed.tool_calls]


def check_splits(
    renderer: Renderer, tools: list[dict[str, Any]], prompt: list[int], ids: Sequence[int], cuts: Sequence[int]
) -> None:
    """However the stream is cut, the message is the same, and its deltas add up to it."""
    whole, _ = parse(renderer, tools, prompt, ids)
    split, deltas = parse(renderer, tools, prompt, ids, cuts)
    one_by_one, _ = parse(renderer, tools, prompt, ids, range(len(ids)))
    assert shown(split) == shown(whole) == shown(one_by_one) == shown(gather(deltas, []))


def delivered(parsed: ParsedOutput, *, with_reasoning: bool) -> dict[str, Any]:
    """The reply as an agent sends it back, which may leave reasoning out."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if with_reasoning and parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": found.id, "type": "function", "function": {"name": found.name, "arguments": found.arguments}}
            for found in parsed.tool_calls
        ]
    return message


def follow_up(parsed: ParsedOutput, text: str) -> list[dict[str, Any]]:
    """Results of the reply's calls, or another question."""
    ids = [found.id for found in parsed.tool_calls]
    results = [{"role": "tool", "tool_call_id": id, "content": f"{text} {i}"} for i, id in enumerate(ids)]
    return results or [{"role": "user", "content": text}]
