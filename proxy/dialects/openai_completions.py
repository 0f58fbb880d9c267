"""OpenAI Completions: raw prompts, as text or token ids, each with `n` answers; choice i·n + j is prompt i's answer j.

Every parameter is supported, harmless, or refused by name. Besides OpenAI's: `top_k`, `min_p`, and `return_token_ids`,
which adds to each choice `prompt_token_ids`, `token_ids`, `token_logprobs` and `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import orjson
from msgspec import Meta

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.dialect import (
    Answer,
    AnswerDelta,
    ModelRequest,
    ResponseHeader,
    Tokens,
    bad_parameter,
    decode_struct,
    sse,
    unsupported,
)
from agentrl.proxy.dialects.neutral_fields import OF_COMPLETIONS, Table
from agentrl.proxy.dialects.openai_chat import StreamOptions, check_stream_options, error_body, usage_of
from agentrl.proxy.dialects.sampling_fields import SamplingBody, Seed, Stop, TopLogprobs, stops
from agentrl.proxy.dialects.upstream_chunks import read_chunk
from agentrl.proxy.dialects.upstream_event import UpstreamEvent
from agentrl.rendering import ContentDelta

NAMES = {"messages": "prompt"}
"""What errors call differently here."""
MAX_TOKENS = 16
"""What OpenAI generates unless told otherwise."""
TokenId = Annotated[int, Meta(ge=0)]


class CompletionsBody(SamplingBody, kw_only=True):
    """A request as it comes."""

    NEUTRAL: ClassVar[Table] = OF_COMPLETIONS

    prompt: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None  # harmless


class OpenAICompletions:
    """POST /v1/completions."""

    name = "openai.completions"
    body: type[msgspec.Struct] = CompletionsBody

    def decode(self, body: bytes) -> ModelRequest:
        """Read a request. Raises RequestError 400, naming what is wrong."""
        data = decode_struct(body, CompletionsBody)
        prompts = prompts_of(data.prompt)
        n = data.n or 1
        check_stream_options(data.stream_options)
        if data.best_of not in (None, n):
            raise unsupported("best_of", f"best_of is not supported: every answer is delivered, so it must be n, {n}")
        if data.echo and data.logprobs is not None:
            raise unsupported("echo", "echo with logprobs is not supported: prompts are not scored")
        if data.echo and not all(isinstance(prompt, str) for prompt in prompts):
            raise unsupported("echo", "echo is supported for prompts that are text, not token ids")
        return ModelRequest(
            model=data.model,
            prompts=prompts,
            sampling=data.sampling(),
            seed=data.seed,
            max_tokens=data.max_tokens or MAX_TOKENS,
            stop=stops(data.stop),
            n=n,
            stream=bool(data.stream),
            logprobs=data.logprobs is not None,
            top_logprobs=data.logprobs or 0,
            wire=data,
        )

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response."""
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            logprobs = logprobs_of(header, answer.tokens) if request.logprobs else None
            text = echoed(request, index) + answer.message["content"]
            choices.append(_choice(index, text, answer.finish_reason, logprobs) | _extras(request, answer))
        return orjson.dumps(_body(header, choices) | {"usage": usage_of(header, answers)})

    def stream(self, request: ModelRequest, header: ResponseHeader) -> CompletionsStream:
        """An encoder for `text_completion` chunks."""
        return CompletionsStream(request, header)

    def encode_error(self, error: RequestError) -> bytes:
        """An error in OpenAI's shape."""
        return orjson.dumps(error_body(error, NAMES))

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """An answer of another server, or one of its events."""
        return read_chunk(data)

    def status(self, error: RequestError) -> int:
        """Its own."""
        return error.status


class CompletionsStream:
    """Chunks of text; the last one of a choice carries its finish reason."""

    def __init__(self, request: ModelRequest, header: ResponseHeader) -> None:
        self._request = request
        self._header = header
        self._offsets = [0] * request.choices  # where in its choice's text the next token begins

    def start(self) -> bytes:
        """The prompts, if they are to be repeated."""
        if not self._request.wire.echo:
            return b""
        return b"".join(self._chunk(i, echoed(self._request, i)) for i in range(self._request.choices))

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A chunk with the new text, and the new tokens' logprobs if asked for."""
        text = "".join(delta.text for delta in part.deltas if isinstance(delta, ContentDelta))
        logprobs = None
        if self._request.logprobs and part.tokens.ids:
            logprobs = logprobs_of(self._header, part.tokens, self._offsets[choice])
            self._offsets[choice] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return self._chunk(choice, text, logprobs=logprobs) if text or logprobs else b""

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The finish reason."""
        return self._chunk(choice, "", answer.finish_reason, extras=_extras(self._request, answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The usage, if asked for, and the end."""
        options = self._request.wire.stream_options
        usage = b""
        if options is not None and options.include_usage:
            usage = sse(_body(self._header, []) | {"usage": usage_of(self._header, answers)})
        return usage + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        """An event that is an error, and no [DONE]."""
        return sse(error_body(error, NAMES))

    def _chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        *,
        logprobs: Json | None = None,
        extras: Json | None = None,
    ) -> bytes:
        return sse(_body(self._header, [_choice(index, text, finish_reason, logprobs) | (extras or {})]))


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several. Raises RequestError 400 for empty ones and for lists of mixed kinds."""
    if not prompt:
        raise bad_parameter("prompt", "prompt must not be empty")
    if isinstance(prompt, str):
        return [prompt]
    if len({type(item) for item in prompt}) > 1:
        raise bad_parameter("prompt", "prompt must be text, texts, token ids, or lists of token ids, not a mixture")
    if isinstance(prompt[0], int):
        return [prompt]
    for i, one in enumerate(prompt):
        if not one:
            raise bad_parameter(f"prompt[{i}]", f"prompt[{i}] must not be empty")
    return prompt


def echoed(request: ModelRequest, choice: int) -> str:
    """What stands before a choice's text: its prompt, or nothing."""
    prompt = request.prompts[choice // request.n]
    return prompt if request.wire.echo and isinstance(prompt, str) else ""


def logprobs_of(header: ResponseHeader, tokens: Tokens, offset: int = 0) -> Json:
    """Completions' `logprobs`; `text_offset` counts the characters of the tokens' own texts from `offset`."""
    texts = [header.token_text(token) for token in tokens.ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(tokens.logprobs),
        "top_logprobs": _top(header, tokens, texts) if tokens.top is not None else None,
        "text_offset": offsets,
    }


def _top(header: ResponseHeader, tokens: Tokens, texts: Sequence[str]) -> list[dict[str, float]]:
    """For each token the likeliest ones by their text, the sampled one always among them."""
    found = []
    for text, logprob, others in zip(texts, tokens.logprobs, tokens.top or [], strict=True):
        best: dict[str, float] = {}
        for other, token in others:
            best.setdefault(header.token_text(token), other)  # best first; parts of characters may read the same
        found.append({text: logprob} | best if text not in best else best)
    return found


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
    return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}


def _body(header: ResponseHeader, choices: list[Json]) -> Json:
    return {
        "id": f"cmpl-{header.id}",
        "object": "text_completion",
        "created": header.created,
        "model": header.model,
        "choices": choices,
    }


def _extras(request: ModelRequest, answer: Answer) -> Json:
    """What OpenAI does not have: which call a choice is, and its exact tokens when asked for."""
    extras: Json = {"interaction_id": answer.interaction_id} if request.choices > 1 else {}
    if request.wire.return_token_ids:
        extras |= {
            "prompt_token_ids": list(answer.prompt_ids),
            "token_ids": answer.tokens.ids,
            "token_logprobs": answer.tokens.logprobs,
            "weight_versions": answer.versions,
        }
    return extras
