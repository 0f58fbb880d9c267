"""Reads reasoning and tool calls out of a stream, for every format that writes them between markers.

           ┌──────────── think ───────────┐
    CONTENT ── end of think ──◄── REASONING ── a call: held, until the end of think or of the reply
       │ ▲
       ▼ │ the call is sent whole, or its characters are text
      BLOCK

White space around markers is layout: it is kept between two texts and left out at the ends. Malformed, unclosed or
misplaced markup stays text, letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from enum import Enum, auto

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.rendering.encoding.text_decoding import text_decoder
from agentrl.rendering.parsing.alphabet import alphabet
from agentrl.rendering.parsing.call_readers import Items
from agentrl.rendering.parsing.output_formats import Format
from agentrl.rendering.parsing.typed_values import Parameters
from agentrl.rendering.renderer import ContentDelta, Delta, OutputParser, ReasoningDelta, ToolCallDelta, places

MAX_INNER = 64
"""Maximum number of closing markers inside one value; with more, the first one closes the call."""


MAX_REOPENED = 8
"""Maximum number of call openers inside a malformed call that are all tried; with more, only the last one is tried."""


class _Mode(Enum):
    CONTENT = auto()
    REASONING = auto()
    BLOCK = auto()


class MarkupParser(OutputParser):
    """Parses an output into content, reasoning and tool calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: list[int],
        format: Format,
        tools: list[Json] | None,
        *,
        thinks: bool = True,
        in_reasoning: bool = False,
        trims: bool = False,
    ) -> None:
        """`thinks`: the format's reasoning is used; `in_reasoning`: the prompt has opened it.

        Without tools calls are text. `trims`: outer white space of the reply is layout.
        """
        super().__init__(stop_token_ids)
        self._format = format
        self._parameters = Parameters(tools)
        self._alphabet = alphabet(tokenizer, (*format.markers, *format.atoms))
        self._reader = format.reader(self._alphabet)
        self._decoder = text_decoder(tokenizer)
        marked = self._alphabet.marked
        self._think, self._end_think = map(marked, format.think) if thinks else ("", "")
        self._blocks = {marked(start): end and marked(end) for start, end in format.blocks.items()} if tools else {}
        self._section, self._end_section = map(marked, format.section or ("", "")) if tools else ("", "")
        self._dropped = {marked(marker) for marker in format.dropped}
        ends = [end for end in self._blocks.values() if end]
        markers = [self._think, self._end_think, *self._blocks, *ends, self._section, self._end_section, *self._dropped]
        self._markers = sorted({marker for marker in markers if marker}, key=lambda marker: -len(marker))
        self._find = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._bare = format.bare if tools else ""
        self._trims = trims

        self._mode = _Mode.REASONING if in_reasoning else _Mode.CONTENT
        self._may_think = not in_reasoning
        self._after_marker = in_reasoning
        self._tail = ""  # text that may become a marker
        self._gap = ""  # white space, or the beginning of a section: the next text decides whether it is layout
        self._layout = False  # the gap is next to a marker
        self._has_content = False
        self._in_section = False
        self._sectioned = False  # the section has held a call
        self._opener = ""
        self._body: list[str] = []
        self._inner: int | None = None  # the end of the first closing marker inside a value
        self._inners = 0
        self._reopened: list[int] = []  # where other calls begin in the body
        self._draft: list[str] | None = None  # reasoning from the first call in it on
        self._calls = 0

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        letters = self._alphabet.letters
        for at in places(ids, letters.keys()):
            text = self._decoder.push_run(ids[start:at]) + self._decoder.flush()
            yield from self._scan(text + letters[ids[at]])
            start = at + 1
        yield from self._scan(self._decoder.push_run(ids[start:]))

    def _end(self) -> Iterator[Delta]:
        yield from self._scan(self._decoder.flush())
        yield from self._rest()
        if self._draft is not None:
            yield from self._end_in_reasoning("".join(self._draft))
        yield from self._end_blocks()
        if self._mode is _Mode.CONTENT and (self._gap.strip() or not (self._trims or self._layout)):
            yield ContentDelta(self._alphabet.spelled(self._gap))

    def _rest(self) -> Iterator[Delta]:
        tail, self._tail = self._tail, ""
        yield from self._on_text(tail)

    def _scan(self, text: str) -> Iterator[Delta]:
        """Split text at markers, holding back what may be the beginning of one."""
        text, at = self._tail + text, 0
        while found := self._find.search(text, at):
            yield from self._on_text(text[at : found.start()])
            at = found.end()
            again = yield from self._on_marker(found[0])
            if again:
                text, at = again + text[at:], 0
        cut = len(text) - max((_overlap(text, marker) for marker in self._markers if len(marker) > 1), default=0)
        cut = max(cut, at)
        self._tail = text[cut:]
        yield from self._on_text(text[at:cut])

    def _on_text(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._mode is _Mode.BLOCK:
            self._body.append(text)
            return
        if self._draft is not None:
            self._draft.append(text)
            return
        if text.isspace():
            self._gap += text
            return
        text = self._gap + text
        if self._mode is _Mode.CONTENT and self._bare and not self._has_content:
            if text.lstrip()[0] in self._bare:
                self._gap = ""
                self._open_block("", text)
                return
            self._bare = ""
        if self._after_marker or (self._trims and not self._has_content and self._mode is _Mode.CONTENT):
            text = text.lstrip()
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        if kept:
            self._after_marker = self._may_think = self._layout = False
            kept = self._alphabet.spelled(kept)
            if self._mode is _Mode.REASONING:
                yield ReasoningDelta(kept)
            else:
                self._has_content = True
                yield ContentDelta(kept)

    def _on_marker(self, marker: str) -> Generator[Delta, None, str]:
        """Handle a marker and yield the deltas that it completes. Returns text that must be scanned again."""
        again = ""
        if self._mode is _Mode.BLOCK:
            again = yield from self._in_block(marker)
        elif self._mode is _Mode.REASONING:
            yield from self._in_reasoning(marker)
        elif marker == self._think and self._may_think:
            self._switch(_Mode.REASONING)
            self._may_think = False
        elif marker in self._blocks and (self._in_section or not self._format.needs_section):
            self._open_block(marker)
        elif marker == self._section and (self._sectioned or not self._in_section):
            self._in_section, self._sectioned = True, False
            self._gap += marker
        elif marker == self._end_section and self._sectioned:
            self._in_section = self._sectioned = False
            self._layout = True
        elif marker in self._dropped:
            self._layout = self._after_marker = True
        else:
            yield from self._on_text(marker)
        return again

    def _in_reasoning(self, marker: str) -> Iterator[Delta]:
        if marker == self._end_think:
            if self._draft is not None:
                yield from self._end_draft()
            self._switch(_Mode.CONTENT)
        elif (
            self._draft is None and self._format.ends_reasoning and (marker in self._blocks or marker == self._section)
        ):
            self._draft = [self._gap, marker]
            self._gap = ""
        else:
            yield from self._on_text(marker)

    def _end_draft(self) -> Iterator[Delta]:
        text, self._draft = "".join(self._draft or ()), None
        yield from self._on_text(text)

    def _end_in_reasoning(self, draft: str) -> Iterator[Delta]:
        """Handle a reply that ends inside reasoning with a call. The call counts if a stop token ended the reply."""
        if self._stop is None:
            yield from self._end_draft()
            return
        gap, before = self._gap, self._calls
        self._draft = None
        self._switch(_Mode.CONTENT)
        deltas = [*self._scan(draft), *self._rest(), *self._end_blocks()]
        if self._calls == before:
            self._mode, self._gap, self._after_marker = _Mode.REASONING, gap, False
            deltas = list(self._on_text(draft))
        yield from deltas

    def _switch(self, mode: _Mode) -> None:
        self._mode, self._gap, self._after_marker, self._layout = mode, "", True, True

    def _open_block(self, marker: str, *body: str) -> None:
        self._mode, self._opener, self._body = _Mode.BLOCK, marker, list(body)
        self._inner, self._inners, self._reopened = None, 0, []

    def _in_block(self, marker: str) -> Generator[Delta, None, str]:
        """Handle a marker in the body of a call. Returns text that must be scanned again."""
        if marker != self._blocks.get(self._opener):
            if marker in self._blocks:
                self._reopened.append(len(self._body))
            self._body.append(marker)
            return ""
        body = "".join(self._body)
        items = self._reader.read(body, self._parameters)
        if items is None and self._inners < MAX_INNER and self._reader.goes_on(body):
            self._body.append(marker)
            self._inner = self._inner or len(self._body)
            self._inners += 1
            return ""
        if items is not None:
            yield from self._deliver(items)
            return ""
        self._body.append(marker)
        return (yield from self._no_call(self._inner or self._next_opener()))

    def _end_blocks(self) -> Iterator[Delta]:
        """Resolve the open block at the end of the output: as a call, or as text."""
        while self._mode is _Mode.BLOCK:
            body = "".join(self._body)
            endless = self._blocks.get(self._opener) is None
            items = self._reader.read(body, self._parameters) if endless else None
            if items is not None:
                yield from self._deliver(items)
                continue
            again = yield from self._no_call(self._inner or len(self._body))
            yield from self._scan(again)
            yield from self._rest()

    def _deliver(self, items: Items) -> Iterator[Delta]:
        self._mode = _Mode.CONTENT
        if self._in_section:
            self._gap, self._sectioned = self._gap.replace(self._section, ""), True
        self._layout, self._bare, self._may_think = True, "", False
        self._after_marker = not self._has_content
        for item in items:
            if isinstance(item, str):
                yield from self._on_text(item)
                continue
            yield ToolCallDelta(self._calls, item.id or self._format.new_id(), item.name, item.arguments)
            self._calls += 1

    def _next_opener(self) -> int:
        """Where to read on in a body that is no call: at the next call inside it, or at the last one if there are too
        many.
        """
        if not self._reopened:
            return len(self._body)
        return self._reopened[0 if len(self._reopened) <= MAX_REOPENED else -1]

    def _no_call(self, cut: int) -> Generator[Delta, None, str]:
        """Emit the block as text up to part `cut` of its body; returns the rest."""
        self._mode, self._bare = _Mode.CONTENT, ""
        head, rest = self._body[:cut], self._body[cut:]
        yield from self._on_text(self._opener + "".join(head))
        return "".join(rest)


def _overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
