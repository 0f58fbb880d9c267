"""Streams the output of a `renderers` family, whose own parser wants the whole output at once.

Text between markers is plain, and a question to the library tells where it belongs: parse what came so far and the
letter `x`, and see whether the `x` ends the reasoning or the content. So the library is asked once per marker, and once
more at the end. What may be markup, and everything after it that the answer does not settle, waits for the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

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
from agentrl.rendering.text import decode, text_decoder
from agentrl.schemas import Json

MAX_QUESTIONS = 16
"""Markers after which the library is asked; an output with more is held back."""

# What text between markers may begin, in formats whose markup is not made of tokens.
_MARKUP = re.compile(r"[<{\[`|]")

# What a parser may raise over text that a model made up.
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError)


class _Channel(Enum):
    REASONING = auto()
    CONTENT = auto()
    HEADER = auto()  # in the text that reasoning begins with
    UNCLEAR = auto()  # inside markup: the next marker may settle it
    HELD = auto()  # until the end


class FamilyParser(OutputParser):
    """Reasoning and content as they come, tool calls at the end.

    Both texts are without outer white space, as most families strip it. Malformed tool calls are content, and so is any
    call where the request has no tools. Where the library cannot parse an output, parses it otherwise than it was
    streamed, or leaves out what stands between the markers of a call, the rest of the text is content.
    """

    def __init__(
        self,
        library: Any,
        tokenizer: Tokenizer,
        stop_token_ids: list[int],
        tools: list[Json] | None,
        prompt_ids: list[int],
        *,
        call_markers: Sequence[str],
        header: str,
    ) -> None:
        """`library` is the renderer whose `parse_response` has the last word.

        `call_markers` stand only in calls; `header` is the text that reasoning begins with and that is no part of it.
        """
        super().__init__(stop_token_ids)
        self._library = library
        self._tokenizer = tokenizer
        self._tools = tools or None
        self._prompt_ids = prompt_ids
        self._call_markers = call_markers
        self._header = header
        self._decoder = text_decoder(tokenizer)
        self._markers = frozenset(tokenizer.get_added_tokens_decoder())
        self._spelled = tokenizer.token_to_id("</think>") is None  # the end of reasoning is spelled, not one token
        self._letter = tokenizer.encode("x", add_special_tokens=False).ids
        self._ids: list[int] = []
        self._sent_text = {_Channel.REASONING: "", _Channel.CONTENT: ""}
        self._gap = ""  # white space that may be the end of its channel
        self._head = ""  # what came of a header
        self._unsent: list[str] = []  # text, markers included, since the last delta
        self._questions = 0
        self._channel = self._ask()

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        for at in places(ids, self._markers):
            yield from self._between_markers(ids[start:at])
            self._take(ids[at : at + 1])
            self._channel = self._after_marker()
            self._gap = self._head = ""
            start = at + 1
        yield from self._between_markers(ids[start:])

    def _between_markers(self, ids: Sequence[int]) -> Iterator[Delta]:
        """Ids at once, unless one of them may change the channel."""
        may_change = self._channel is _Channel.HEADER or self._may_be_markup(decode(self._tokenizer, ids))
        for part in [ids[i : i + 1] for i in range(len(ids))] if may_change else [ids]:
            text = self._take(part)
            if self._channel is _Channel.HEADER:
                self._channel = self._in_header(text)
            elif self._may_be_markup(text):
                self._channel = _Channel.HELD
            elif self._channel in self._sent_text:
                yield from self._send_plain(text)

    def _take(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decoder.push_run(ids)
        self._unsent.append(text)
        return text

    def _may_be_markup(self, text: str) -> bool:
        plain = self._channel is _Channel.HELD or (self._channel is _Channel.REASONING and not self._spelled)
        return not plain and _MARKUP.search(text) is not None

    def _send_plain(self, text: str) -> Iterator[Delta]:
        text = self._gap + text if self._sent_text[self._channel] else text.lstrip()
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        if kept:
            self._sent_text[self._channel] += kept
            self._unsent = [self._gap]
            yield ReasoningDelta(kept) if self._channel is _Channel.REASONING else ContentDelta(kept)

    def _after_marker(self) -> _Channel:
        if self._channel is _Channel.HELD or self._questions == MAX_QUESTIONS:
            return _Channel.HELD
        now = self._ask()
        # Streams go from reasoning to content, once. Anything else is sorted out at the end.
        forward = now is _Channel.UNCLEAR or (now is not self._channel and not self._sent_text[now])
        if not forward or self._sent_text[_Channel.CONTENT]:
            return _Channel.HELD
        return _Channel.HEADER if now is _Channel.REASONING and self._header else now

    def _in_header(self, text: str) -> _Channel:
        self._head += text
        if self._head == self._header:
            return self._ask()
        return _Channel.HEADER if self._header.startswith(self._head) else _Channel.HELD

    def _ask(self) -> _Channel:
        """Where plain text that came now would belong."""
        self._questions += 1
        parsed = self._parse(self._ids + self._letter)
        if parsed is None or parsed.tool_calls:
            return _Channel.UNCLEAR
        sent = self._sent_text[_Channel.REASONING]
        match (parsed.reasoning_content or "").strip(), parsed.content.strip():
            case (reasoning, "x") if reasoning == sent:
                return _Channel.CONTENT
            case (reasoning, "") if reasoning.endswith("x") and reasoning[:-1].strip() == sent:
                return _Channel.REASONING
        return _Channel.UNCLEAR

    def _end(self) -> Iterator[Delta]:
        self._unsent.append(self._decoder.flush())
        ids = self._ids if self._stop is None else [*self._ids, self._stop]
        parsed = self._parse(ids)
        rest = None if parsed is None or self._swallowed(ids, parsed) else self._rest_of(parsed)
        if rest is None:
            text = "".join(self._unsent)
            yield ContentDelta(text.rstrip() if self._sent_text[_Channel.CONTENT] else text.strip())
            return
        reasoning, content = rest
        yield ReasoningDelta(reasoning)
        yield ContentDelta(content)
        sound = [call for call in parsed.tool_calls if self._is_sound(call)]
        for index, call in enumerate(sound):
            yield ToolCallDelta(index, call.id or new_call_id(), call.name, _arguments(call.arguments))

    def _rest_of(self, parsed: Any) -> tuple[str, str] | None:
        """Reasoning and content of the whole output behind what was sent; None if that is no beginning of them."""
        broken = [self._text_of(call) for call in parsed.tool_calls if not self._is_sound(call)]
        content = "\n".join(filter(None, [parsed.content.strip(), *broken]))
        reasoning = (parsed.reasoning_content or "").strip()
        sent_reasoning, sent_content = self._sent_text.values()
        if not (reasoning.startswith(sent_reasoning) and content.startswith(sent_content)):
            return None
        if sent_content and reasoning != sent_reasoning:
            return None  # reasoning cannot go on behind content
        return reasoning[len(sent_reasoning) :], content[len(sent_content) :]

    def _is_sound(self, call: Any) -> bool:
        """Whether it is a call, of a request that has tools.

        A value that formats without quotes could not read as its parameter's type is text: the tool may judge it.
        """
        if self._tools is None or not isinstance(call.name, str):
            return False
        if call.status == "invalid_json":
            return isinstance(call.arguments, dict)
        return call.status == "ok" and isinstance(call.arguments, str | dict | None)

    def _swallowed(self, ids: list[int], parsed: Any) -> bool:
        """Whether the library has taken markers of a call for no call, and left their text out."""
        if parsed.tool_calls:
            return False
        written = decode(self._tokenizer, ids)
        kept = f"{parsed.reasoning_content}{parsed.content}"
        return any(written.count(marker) > kept.count(marker) for marker in self._call_markers)

    def _text_of(self, call: Any) -> str:
        """A malformed call as the model wrote it, with its markers where the library says which ids it is."""
        raw: str = call.raw
        if call.token_span is None:
            return raw.strip()
        start, end = call.token_span
        text = decode(self._tokenizer, self._ids[start:end])
        return (text if raw in text else raw).strip()

    def _parse(self, ids: list[int]) -> Any:
        try:
            return self._library.parse_response(ids, tools=self._tools, prompt_ids=self._prompt_ids)
        except _PARSE_ERRORS:
            return None


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
