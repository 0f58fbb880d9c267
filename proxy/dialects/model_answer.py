"""A call's answer, the same for every dialect: its parts as they are generated, and the whole.

An answer's message is in the shape of Chat Completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.domain.schemas import Json
from agentrl.rendering import Delta, ParsedOutput
from agentrl.rendering.encoding.text_decoding import reasoning_tokens

TopLogprobs = list[list[tuple[float, int]]]  # for each token the likeliest (logprob, id), best first


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseHeader:
    """The fields of a response that are known when its first answer begins."""

    id: str  # the first answer's interaction: 32 hex digits
    created: int  # seconds since the epoch
    model: str  # as the caller named it
    prompt_tokens: int
    max_context: int | None = None  # tokens, prompt and output together
    decode: Callable[[Sequence[int]], str]  # text of token ids, including special tokens

    def token_text(self, token: int) -> str:
        """The text of one token."""
        return self.decode([token])

    def reasoning_tokens(self, answer: Answer) -> int:
        """The number of an answer's tokens that are reasoning."""
        return reasoning_tokens(answer.tokens.ids, answer.message.get("reasoning_content"), self.decode)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens. `ids`, `logprobs` and, if requested, `top` have the same length."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    top: TopLogprobs | None = None

    def best(self, count: int) -> Tokens:
        """The same tokens with only the `count` likeliest at each place; those are what the client asked for."""
        if self.top is None:
            return self
        return Tokens(self.ids, self.logprobs, [row[:count] for row in self.top] if count else None)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The part of an answer that one engine event brings: deltas of the message, and the sampled tokens."""

    deltas: list[Delta]
    tokens: Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished call, committed and ready to be encoded."""

    interaction_id: str
    message: Json  # role, content, reasoning_content, tool_calls
    finish_reason: str  # stop | length | tool_calls
    stop: str | None  # the stop string that ended the answer
    prompt_ids: Sequence[int]
    cached_tokens: int
    tokens: Tokens
    versions: list[list[int]]  # [weight version, start, end) over the output tokens


def message_of(parsed: ParsedOutput) -> Json:
    """The assistant message as a client will send it back."""
    message: Json = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message
