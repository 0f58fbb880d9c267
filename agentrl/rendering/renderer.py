"""The interface of renderers: messages → ids, ids → message, and the extension of a prompt by new turns."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.domain.schemas import ForkReason, Json


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text to append to the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text to append to the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of tool call `index`. The first part names the call; later ones append to its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A complete output as a message. `deltas` are those that `push` has not returned yet.

    `content` is None only with tool calls or reasoning; an empty output has the content "".
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    deltas: list[Delta]


@dataclass(frozen=True, slots=True)
class Bridge:
    """The extension of `previous_ids` by `delta_ids`, or the `reason` why there is none."""

    delta_ids: list[int] | None
    reason: ForkReason | None = None

    def __post_init__(self) -> None:
        if (self.delta_ids is None) == (self.reason is None):
            raise ValueError("a bridge has either delta_ids or a reason to fork")


@dataclass(frozen=True, slots=True)
class Opening:
    """The opening of a tool call, written for the model: `ids` are appended to the prompt and passed to the parser.

    `grammar` constrains the following tokens, as an SGLang sampling parameter (`structural_tag` or `regex`). Without it
    the output need not be a call.
    """

    ids: list[int]
    grammar: Json = field(default_factory=dict)


class OutputParser(ABC):
    """Parses sampled ids into deltas, independently of how the stream was split.

    The final message is the concatenation of all deltas, so the recorded message equals the streamed one. The first
    stop token ends the message and is not part of its text.
    """

    def __init__(self, stop_token_ids: Iterable[int]) -> None:
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop: int | None = None  # the token that ended the message
        self._finished = False
        self._sent: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Parse further ids; returns the deltas that are certain."""
        assert not self._finished, "push after finish"
        if self._stop is not None:
            return []
        if stops := places(ids, self._stop_token_ids):
            self._stop, ids = ids[stops[0]], ids[: stops[0]]
        return self._send(self._run(ids))

    def finish(self) -> ParsedOutput:
        """The complete message. Call it once, after the last id."""
        assert not self._finished, "finish called twice"
        self._finished = True
        last = self._send(self._end())
        return gather(self._sent, last)

    def _send(self, deltas: Iterable[Delta]) -> list[Delta]:
        merged = merge(deltas)
        self._sent += merged
        return merged

    @abstractmethod
    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        """The certain deltas for ids without stop tokens. Their concatenation is independent of the split."""

    @abstractmethod
    def _end(self) -> Iterator[Delta]:
        """The deltas that were held back until the end."""


class Renderer(Protocol):
    """Converts messages to ids and back for one model. `messages` are validated; tools are in OpenAI's format."""

    name: str
    stop_token_ids: list[int]
    vocab_size: int  # exclusive upper bound of ids
    max_context: int | None  # tokens, prompt and output together
    max_chars: int | None  # longest text that can fit, without white space; None: unknown
    reasons: bool  # whether the format has reasoning
    thinking_option: str | None  # the option that enables thinking; None: there is none

    def with_options(self, options: Json) -> Renderer:
        """The renderer with the given template options (validated by `check_options`).

        Raises RequestError 400 for an unknown option.
        """
        ...

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """Render the conversation, with the generation prompt."""
        ...

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """The extension of `previous_ids` (an earlier call's prompt and output) by `messages_after`.

        It ends with the generation prompt. `messages_before` is the conversation of `previous_ids`, with the sampled
        reply; template renderers need it to prove that the prefix is stable.
        """
        ...

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser for one output of this prompt."""
        ...

    def text_parser(self) -> OutputParser:
        """A parser without markup: the text up to a stop token, without special tokens."""
        ...

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """The opening of a call of the tool `name`, or of any tool.

        Raises RequestError 400 for an unknown `name`, and for a format without openings.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a raw prompt with the tokenizer's prefix; special tokens in it are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        ...


def new_call_id() -> str:
    """A unique id for a tool call. It distinguishes otherwise equal conversations."""
    return f"call_{secrets.token_hex(12)}"


def places(ids: Sequence[int], wanted: Set[int]) -> list[int]:
    """The positions of ids that are in a set."""
    return [] if wanted.isdisjoint(ids) else [i for i, token in enumerate(ids) if token in wanted]


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join adjacent deltas of one kind and drop empty ones."""
    merged: list[Delta] = []
    for delta in deltas:
        match delta, merged[-1] if merged else None:
            case (ContentDelta("") | ReasoningDelta(""), _):
                pass
            case ContentDelta(text), ContentDelta(before):
                merged[-1] = ContentDelta(before + text)
            case ReasoningDelta(text), ReasoningDelta(before):
                merged[-1] = ReasoningDelta(before + text)
            case _:
                merged.append(delta)
    return merged


def gather(deltas: Iterable[Delta], last: list[Delta]) -> ParsedOutput:
    """The message of a stream of deltas."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallDelta(index, str(id), str(name), arguments):
                calls[index] = ToolCall(id, name, arguments)
            case ToolCallDelta(index, _, _, arguments):
                call = calls[index]
                calls[index] = ToolCall(call.id, call.name, call.arguments + arguments)
    return ParsedOutput(
        content="".join(content) if content or not (calls or reasoning) else None,
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=[calls[index] for index in sorted(calls)],
        deltas=last,
    )
