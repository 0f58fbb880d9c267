"""What rendering promises: messages → ids, ids → message, and how one turn extends another."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.domain.schemas import ForkReason, Json


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that follows the content sent so far."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that follows the reasoning sent so far."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call `index`. The first one of an index names the call; later ones extend its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A finished tool call; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole output as a message. `deltas` are the last ones, not yet returned by `push`.

    `content` is None only beside tool calls or reasoning; an output without anything has the content "".
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    deltas: list[Delta]


@dataclass(frozen=True, slots=True)
class Bridge:
    """How the next prompt extends `previous_ids`: by `delta_ids`, or not at all, for `reason`."""

    delta_ids: list[int] | None
    reason: ForkReason | None = None

    def __post_init__(self) -> None:
        if (self.delta_ids is None) == (self.reason is None):
            raise ValueError("a bridge has either delta_ids or a reason to fork")


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a tool call, written for the model: `ids` go behind the prompt, and into the parser.

    `grammar` is what the tokens sampled behind them must match, as a sampling parameter of SGLang (`structural_tag` or
    `regex`). Without one nothing says that they are a call.
    """

    ids: list[int]
    grammar: Json = field(default_factory=dict)


class OutputParser(ABC):
    """Reads sampled ids into deltas. How the stream was cut does not matter: a run of ids means what each of them does.

    The finished message is the concatenation of all deltas: what was streamed is what is recorded. The first stop
    token ends the message and is no part of its text.
    """

    def __init__(self, stop_token_ids: Iterable[int]) -> None:
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop: int | None = None  # the token that ended the message
        self._finished = False
        self._sent: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """The deltas that `ids`, which follow those pushed before, make certain."""
        assert not self._finished, "push after finish"
        if self._stop is not None:
            return []
        if stops := places(ids, self._stop_token_ids):
            self._stop, ids = ids[stops[0]], ids[: stops[0]]
        return self._send(self._run(ids))

    def finish(self) -> ParsedOutput:
        """The whole message. Call once, after the last id."""
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
        """The deltas that more ids, none of them a stop token, make certain; joined, they do not depend on the cut."""

    @abstractmethod
    def _end(self) -> Iterator[Delta]:
        """What was held back until no more ids can come."""


class Renderer(Protocol):
    """Messages ↔ ids of one model. `messages` have passed `validate_messages`; tools are in OpenAI's shape."""

    name: str
    stop_token_ids: list[int]
    vocab_size: int  # ids are below it
    max_context: int | None  # tokens, prompt and output together
    max_chars: int | None  # a longer text, white space aside, never fits into it; None where no bound is known
    reasons: bool  # the format has a place for reasoning
    thinking_option: str | None  # the option that tells the format whether to think; None: it has none

    def with_options(self, options: Json) -> Renderer:
        """The same model, its chat format told `options` (checked by `check_options`).

        Raises RequestError 400 for an option that the format does not have.
        """
        ...

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """The prompt: the whole conversation, ending with the generation prompt."""
        ...

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """What follows `previous_ids` (an earlier call's prompt and output) when `messages_after` were added.

        The delta ends with the generation prompt. `messages_before` is the conversation that `previous_ids` stand
        for, the sampled reply included; renderers that must ask a chat template prove stability on it.
        """
        ...

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser for one output of this prompt."""
        ...

    def text_parser(self) -> OutputParser:
        """A parser that reads no markup: the text up to a stop token, special tokens left out."""
        ...

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """The beginning of a call of the tool `name`, or of any: what the model would write until it has a choice.

        With one tool, any is that one. Raises RequestError 400 for a `name` that is no tool's, and where the format
        cannot do it.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """A raw prompt: special tokens spelled in it count, with what the tokenizer itself puts first."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        ...


def new_call_id() -> str:
    """An id for a tool call, unique over all interactions: it tells equal conversations apart."""
    return f"call_{secrets.token_hex(12)}"


def places(ids: Sequence[int], wanted: Set[int]) -> list[int]:
    """Where the ids stand that are in a set; most runs have none."""
    return [] if wanted.isdisjoint(ids) else [i for i, token in enumerate(ids) if token in wanted]


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The same stream with neighbours of one kind joined and empty ones left out."""
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
    """The message that a stream of deltas adds up to."""
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
