"""OpenAI Completions: raw prompts, as text or token ids, each with `n` answers; choice i·n + j is answer j to prompt i.

Every parameter is supported, ignored without harm, or refused by name. In addition to OpenAI's: `top_k`, `min_p`, and
`return_token_ids`, which adds to each choice `prompt_token_ids`, `token_ids`, `token_logprobs` and `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import orjson
from msgspec import Meta

from agentrl.domain.schemas import Json
from agentrl.errors import bad_parameter
from agentrl.proxy.dialects.body_decoding import decode_struct
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.neutral_fields import OF_COMPLETIONS, Table
from agentrl.proxy.dialects.openai.chat_output import usage_of
from agentrl.proxy.dialects.openai.chat_request import StreamOptions, check_stream_options
from agentrl.proxy.dialects.openai.completions_output import (
    NAMES,
    CompletionsStream,
    choice_json,
    completion_json,
    echoed,
    extra_fields,
    logprobs_of,
)
from agentrl.proxy.dialects.openai.openai_dialect import OpenAIDialect
from agentrl.proxy.dialects.parameter_errors import unsupported
from agentrl.proxy.dialects.sampling_fields import SamplingBody, Seed, Stop, TopLogprobs, stops

MAX_TOKENS = 16
"""OpenAI's default."""


TokenId = Annotated[int, Meta(ge=0)]


class CompletionsBody(SamplingBody, kw_only=True):
    """The body of a request."""

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
    user: str | None = None  # accepted without effect


class OpenAICompletions(OpenAIDialect):
    """POST /v1/completions."""

    name = "openai.completions"
    body: type[msgspec.Struct] = CompletionsBody
    parameter_names = NAMES

    def decode(self, body: bytes) -> ModelRequest:
        """Decode a request. Raises RequestError 400 that names the field at fault."""
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
            choices.append(choice_json(index, text, answer.finish_reason, logprobs) | extra_fields(request, answer))
        return orjson.dumps(completion_json(header, choices) | {"usage": usage_of(header, answers)})

    def stream(self, request: ModelRequest, header: ResponseHeader) -> CompletionsStream:
        """An encoder for `text_completion` chunks."""
        return CompletionsStream(request, header)


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts, as a list. Raises RequestError 400 for empty prompts and for lists of mixed kinds."""
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
