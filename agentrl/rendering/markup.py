"""Reads reasoning and Hermes tool calls, `<think>…</think>` and `<tool_call>{json}</tool_call>`, out of a stream.

A marker that is one token of the vocabulary counts only as that token; the same letters spelled by other tokens are
text. Markers that the vocabulary does not have are found in the text. White space around markers is layout and dropped.
What is malformed, unclosed or out of place stays text, letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from tokenizers import Tokenizer

from agentrl.rendering.base import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    new_call_id,
    places,
)
from agentrl.rendering.messages import parse_arguments
from agentrl.rendering.text import text_decoder

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class _Mode(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class MarkupParser(OutputParser):
    """Content, reasoning and tool calls of an output; `markers` are those that this model and request use."""

    def __init__(
        self, tokenizer: Tokenizer, stop_token_ids: list[int], markers: Sequence[str], *, in_reasoning: bool = False
    ) -> None:
        """`in_reasoning`: the prompt has opened the reasoning already."""
        super().__init__(stop_token_ids)
        self._decoder = text_decoder(tokenizer)
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        self._by_id = {id: marker for marker, id in ids.items() if id is not None}
        self._in_text = [marker for marker, id in ids.items() if id is None]
        self._tail = ""  # text that may become a marker
        self._mode = _Mode.REASONING if in_reasoning else _Mode.CONTENT
        self._gap = ""  # white space that a marker may turn into layout
        self._after_marker = in_reasoning
        self._call = ""
        self._calls = 0
        self._may_think = not in_reasoning

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        for at in places(ids, self._by_id.keys()):
            yield from self._scan(self._decoder.push_run(ids[start:at]))
            yield from self._rest()
            yield from self._on_marker(self._by_id[ids[at]])
            start = at + 1
        yield from self._scan(self._decoder.push_run(ids[start:]))

    def _end(self) -> Iterator[Delta]:
        yield from self._rest()
        if self._mode is _Mode.CALL:
            yield from self._not_a_call(CALL + self._call)
        if self._mode is _Mode.CONTENT:
            yield ContentDelta(self._gap)

    def _rest(self) -> Iterator[Delta]:
        yield from self._scan(self._decoder.flush())
        tail, self._tail = self._tail, ""
        yield from self._on_text(tail)

    def _scan(self, text: str) -> Iterator[Delta]:
        """Split text at the markers that are text, holding back what may be the beginning of one."""
        self._tail += text
        while found := [(at, marker) for marker in self._in_text if (at := self._tail.find(marker)) >= 0]:
            at, marker = min(found)
            before, self._tail = self._tail[:at], self._tail[at + len(marker) :]
            yield from self._on_text(before)
            yield from self._on_marker(marker)
        keep = max((_overlap(self._tail, marker) for marker in self._in_text), default=0)
        cut = len(self._tail) - keep
        before, self._tail = self._tail[:cut], self._tail[cut:]
        yield from self._on_text(before)

    def _on_text(self, text: str) -> Iterator[Delta]:
        if self._mode is _Mode.CALL:
            self._call += text
            return
        text = self._gap + text
        if self._after_marker:
            text = text.lstrip()
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        if kept:
            self._after_marker = self._may_think = False
            yield ReasoningDelta(kept) if self._mode is _Mode.REASONING else ContentDelta(kept)

    def _on_marker(self, marker: str) -> Iterator[Delta]:
        match self._mode, marker:
            case (_Mode.CONTENT, "<think>") if self._may_think:
                self._open(_Mode.REASONING)
                self._may_think = False
            case (_Mode.REASONING, "</think>"):
                self._open(_Mode.CONTENT)
            case (_Mode.CONTENT, "<tool_call>"):
                self._mode, self._call = _Mode.CALL, ""
            case (_Mode.CALL, "</tool_call>"):
                yield from self._close_call()
            case _:
                yield from self._on_text(marker)

    def _open(self, mode: _Mode) -> None:
        self._mode, self._gap, self._after_marker = mode, "", True

    def _close_call(self) -> Iterator[Delta]:
        call = read_call(self._call)
        if call is None:
            yield from self._not_a_call(CALL + self._call + END_CALL)
            return
        name, arguments = call
        yield ToolCallDelta(self._calls, new_call_id(), name, arguments)
        self._calls += 1
        self._open(_Mode.CONTENT)
        self._may_think = False

    def _not_a_call(self, text: str) -> Iterator[Delta]:
        self._mode = _Mode.CONTENT
        yield from self._on_text(text)


def read_call(text: str) -> tuple[str, str] | None:
    """Name and JSON arguments of a Hermes call, or None where it is malformed."""
    match parse_arguments(text):
        case {"name": str(name), **rest} if name:
            arguments = parse_arguments(rest.get("arguments"))
            return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
    return None


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
