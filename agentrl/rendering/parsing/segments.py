"""Parses replies that consist of several messages with headers: gpt-oss's Harmony, and Inkling.

    header  marker  body  end   header  marker  body  end   …

Header and marker determine whether a body is reasoning, content, or the arguments of a call. Reasoning and content are
streamed; a call is emitted at the end of its body. Other text is content, with its markers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.rendering.encoding.text_decoding import text_decoder
from agentrl.rendering.parsing.alphabet import alphabet
from agentrl.rendering.parsing.call_readers import in_string, is_name
from agentrl.rendering.parsing.typed_values import read_json, write_json
from agentrl.rendering.renderer import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    new_call_id,
    places,
)

MAX_INNER = 64
"""Maximum number of markers of a reply inside call arguments; each further marker ends its body."""
PROMPT_TAIL = 32  # more tokens than a header has
BREAK = "\n"
"""Separates two bodies of one kind; in the ids, only markers separate them."""


class Kind(Enum):
    """The kind of a body."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    OTHER = auto()  # content, with its header and markers


class SegmentParser(OutputParser):
    """Parses an output of several messages into content, reasoning and calls."""

    opens: str
    """The marker at the start of a message. The first message's marker is in the prompt."""
    role: str
    """The beginning of a header."""
    bodies: tuple[str, ...]
    ends: tuple[str, ...]
    others: tuple[str, ...]
    """Markers within headers."""
    name: str
    think: tuple[str, str]
    reasoning_key = "reasoning_content"

    def __init__(
        self, tokenizer: Tokenizer, stop_token_ids: list[int], tools: list[Json] | None, prompt_ids: Sequence[int]
    ) -> None:
        """`prompt_ids` ends with the first message's header, or with its beginning."""
        super().__init__(stop_token_ids)
        self._tools = bool(tools)
        self._alphabet = alphabet(tokenizer, (self.opens, *self.bodies, *self.ends, *self.others))
        self._decoder = text_decoder(tokenizer)
        self._open = self._alphabet.marked(self.opens)
        self._bodies = {self._alphabet.marked(marker): marker for marker in self.bodies}
        self._ends = {self._alphabet.marked(marker) for marker in self.ends}
        self._header: list[str] | None = []  # None within a body
        self._marker = ""
        self._body: list[str] = []
        self._kind = Kind.CONTENT
        self._name = ""
        self._gap = ""
        self._fresh = True  # nothing of this body has been sent
        self._seen_kinds: set[Kind] = set()
        self._calls = 0
        self._inners = 0  # markers within arguments
        for text in self._header_of(prompt_ids[-PROMPT_TAIL:]):
            list(self._read(text))

    def _header_of(self, tail: Sequence[int]) -> Iterator[str]:
        """The pieces of the first message's header that are already in the prompt."""
        letters = self._alphabet.letters
        starts = [at for at, token in enumerate(tail) if letters.get(token) == self._open]
        for token in tail[starts[-1] + 1 :] if starts else ():
            yield letters[token] if token in letters else self._decoder.push_run([token])

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        letters = self._alphabet.letters
        for at in places(ids, letters.keys()):
            yield from self._read(self._decoder.push_run(ids[start:at]) + self._decoder.flush())
            yield from self._read(letters[ids[at]])
            start = at + 1
        yield from self._read(self._decoder.push_run(ids[start:]))

    def _end(self) -> Iterator[Delta]:
        yield from self._read(self._decoder.flush())
        if self._header is not None:
            yield from self._plain(Kind.CONTENT, "".join(self._header).removeprefix(self.role))
        elif self._kind in (Kind.CALL, Kind.OTHER):
            yield from self._end_body(closed=self._ends_calls())

    @abstractmethod
    def _classify(self, header: str, marker: str) -> tuple[Kind, str]:
        """The kind of a body, and the name of the tool that it calls."""

    @abstractmethod
    def _ends_calls(self) -> bool:
        """Whether the token that ended the reply also ends a call."""

    def _arguments(self, name: str, body: str) -> tuple[str, str] | None:
        """Name and JSON arguments of a call; None where its body is malformed."""
        try:
            value = read_json(body)
        except ValueError:
            return None
        return (name, write_json(value)) if isinstance(value, dict) and is_name(name) else None

    def _read(self, text: str) -> Iterator[Delta]:
        """Handle one marker, or text without markers."""
        if not text:
            return
        if self._header is not None:
            yield from self._in_header(text)
        elif self._kind is Kind.CALL and (text in self._ends or text == self._open) and self._in_argument():
            self._body.append(text)
        elif text in self._ends:
            yield from self._end_body(closed=True, end=text)
            self._header = []
        elif text == self._open:
            yield from self._end_body(closed=False)
            self._header = []
        elif self._kind in (Kind.CALL, Kind.OTHER):
            self._body.append(text)
        else:
            yield from self._plain(self._kind, text)

    def _in_argument(self) -> bool:
        """Whether a marker is inside a call's argument. Counts the markers, up to MAX_INNER."""
        self._inners += 1
        return self._inners <= MAX_INNER and in_string("".join(self._body))

    def _in_header(self, text: str) -> Iterator[Delta]:
        assert self._header is not None
        if text in self._bodies:
            header, self._header = "".join(self._header), None
            self._kind, self._name = self._classify(header, self._bodies[text])
            if self._kind is Kind.CALL and not self._tools:
                self._kind = Kind.OTHER
            self._marker, self._body, self._fresh, self._gap = header + text, [], True, ""
        elif text == self._open and not "".join(self._header).strip():
            self._header = []
        elif text in self._ends or text == self._open:
            held, self._header = "".join(self._header).removeprefix(self.role), []
            yield from self._plain(Kind.CONTENT, held)
            self._fresh, self._gap = True, ""
        else:
            self._header.append(text)

    def _plain(self, kind: Kind, text: str) -> Iterator[Delta]:
        """Emit text of a body, without leading and trailing white space."""
        text = self._gap + text
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        if not kept:
            return
        if self._fresh and kind in self._seen_kinds:
            kept = BREAK + kept
        self._fresh = False
        self._seen_kinds.add(kind)
        kept = self._alphabet.spelled(kept)
        yield ReasoningDelta(kept) if kind is Kind.REASONING else ContentDelta(kept)

    def _end_body(self, *, closed: bool, end: str = "") -> Iterator[Delta]:
        if self._kind not in (Kind.CALL, Kind.OTHER):
            self._fresh, self._gap = True, ""
            return
        body = self._alphabet.spelled("".join(self._body))
        found = self._arguments(self._name, body) if self._kind is Kind.CALL and closed else None
        if found is not None:
            yield ToolCallDelta(self._calls, new_call_id(), *found)
            self._calls += 1
        else:
            yield from self._plain(Kind.CONTENT, self._marker.removeprefix(self.role) + body + end)
        self._fresh, self._gap, self._kind = True, "", Kind.CONTENT


_CHANNELS = {"analysis": Kind.REASONING, "final": Kind.CONTENT, "commentary": Kind.CONTENT, "": Kind.CONTENT}


class HarmonyParser(SegmentParser):
    """gpt-oss: `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`; calls are addressed `to=functions.f`."""

    name, think, reasoning_key = "harmony", ("<|channel|>analysis<|message|>", "<|end|>"), "thinking"
    opens, role = "<|start|>", "assistant"
    bodies = ("<|message|>",)
    ends = ("<|end|>", "<|call|>", "<|return|>")
    others = ("<|channel|>", "<|constrain|>")

    def _classify(self, header: str, marker: str) -> tuple[Kind, str]:
        """`to=functions.f<|channel|>commentary <|constrain|>json`; the recipient may be after the channel."""
        spelled = self._alphabet.spelled(header).replace("<|constrain|>", " ")
        before, _, behind = spelled.removeprefix(self.role).partition("<|channel|>")
        words, (channel, *more) = before.split(), behind.split() or [""]
        to = [word for word in (*words, *more) if word.startswith("to=")]
        types = [word for word in more if word not in to]
        if len(to) > 1 or len(types) > 1 or any(word not in to for word in words):
            return Kind.OTHER, ""
        if not to:
            return _CHANNELS.get(channel, Kind.OTHER), ""
        name = to[0].removeprefix("to=")
        return (Kind.CALL if name.startswith("functions.") else Kind.OTHER), name.removeprefix("functions.")

    def _ends_calls(self) -> bool:
        return self._stop is not None


class InklingParser(SegmentParser):
    """Inkling: each kind of body has its own marker; a call has its tool's name before the marker."""

    name, think = "inkling", ("<|content_thinking|>", "<|end_message|>")
    opens, role = "<|message_model|>", ""
    bodies = (
        "<|content_thinking|>",
        "<|content_text|>",
        "<|content_invoke_tool_json|>",
        "<|content_invoke_tool_text|>",
    )
    ends = ("<|end_message|>",)
    others = ()

    def _classify(self, header: str, marker: str) -> tuple[Kind, str]:
        match marker:
            case "<|content_thinking|>":
                return Kind.REASONING, ""
            case "<|content_text|>":
                return Kind.CONTENT, ""
            case "<|content_invoke_tool_json|>":
                return Kind.CALL, header.strip()
        return Kind.OTHER, ""

    def _ends_calls(self) -> bool:
        return False

    def _arguments(self, name: str, body: str) -> tuple[str, str] | None:
        try:
            value = read_json(body)
        except ValueError:
            return None
        match value:
            case {"name": str(named), "args": dict(arguments)} if is_name(named) and name in ("", named):
                return named, write_json(arguments)
            case {"name": str(named)} if "args" not in value and is_name(named) and name in ("", named):
                return named, "{}"
        return None
