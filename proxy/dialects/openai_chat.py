"""OpenAI Chat Completions.

Every parameter is supported, harmless, or refused by name. Besides OpenAI's: `top_k`, `min_p`, and `return_token_ids`,
which adds `prompt_token_ids` and for each choice `token_ids`, `token_logprobs` and `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    Named,
    ResponseHeader,
    Tokens,
    ToolChoice,
    bad_parameter,
    check_neutral,
    decode_struct,
    message_of,
    sse,
    translated,
    unsupported,
)
from agentrl.proxy.dialects.neutral_fields import OF_CHAT, Neutral, Table
from agentrl.proxy.dialects.sampling_fields import SamplingBody, Seed, Stop, TopLogprobs, format_constraint, stops
from agentrl.proxy.dialects.tool_results import Results, text_only
from agentrl.proxy.dialects.upstream_chunks import read_chunk
from agentrl.proxy.dialects.upstream_event import UpstreamEvent
from agentrl.rendering import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from agentrl.rendering.options import check_options
from agentrl.rendering.validation import validate_messages, validate_tools

__all__ = ["OpenAIChat", "message_of"]
NAMES = {"json_schema": "response_format"}
"""What errors call differently here."""
EXCLUDED = Neutral((False,), "reasoning is always delivered")
CONTINUOUS = Neutral((False,), "usage is told once, with the end")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ours pads nothing
    continuous_usage_stats: bool | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to reason; how much is what the policy has learned."""

    effort: str | None = None
    max_tokens: int | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    include: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """A request as it comes."""

    NEUTRAL: ClassVar[Table] = OF_CHAT

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Harmless: nothing here that a policy could do otherwise.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None  # OpenRouter's
    usage: UsageOptions | None = None  # OpenRouter's


class OpenAIChat:
    """POST /v1/chat/completions."""

    name = "openai.chat"
    body: type[msgspec.Struct] = ChatBody

    def decode(self, body: bytes) -> ModelRequest:
        """Read a request. Raises RequestError 400, naming what is wrong."""
        data = decode_struct(body, ChatBody)
        check_stream_options(data.stream_options)
        if data.reasoning is not None:
            check_neutral("reasoning.exclude", data.reasoning.exclude, EXCLUDED)
        messages = text_only(data.messages)
        validate_messages(messages)
        _check_results(messages)
        validate_tools(data.tools)
        if data.top_logprobs and not data.logprobs:
            raise bad_parameter("top_logprobs", "top_logprobs needs logprobs: true")
        return ModelRequest(
            model=data.model,
            messages=messages,
            tools=data.tools or None,
            tool_choice=tool_choice(data.tool_choice, data.tools),
            parallel_tool_calls=data.parallel_tool_calls is not False,
            template_options=check_options(data.chat_template_kwargs),
            thinks=_thinks(data),
            sampling=data.sampling(),
            constraint=format_constraint(data.response_format, "response_format", nested="json_schema"),
            seed=data.seed,
            max_tokens=_max_tokens(data),
            stop=stops(data.stop),
            n=data.n or 1,
            stream=bool(data.stream),
            logprobs=bool(data.logprobs),
            top_logprobs=data.top_logprobs or 0,
            wire=data,
        )

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response."""
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            choice: Json = {
                "index": index,
                "message": {"reasoning_content": None, **answer.message},
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs_of(header, answer.tokens) if request.logprobs else None,
            }
            choices.append(choice | _extras(request, answer))
        body: Json = {
            "id": f"chatcmpl-{header.id}",
            "object": "chat.completion",
            "created": header.created,
            "model": header.model,
            "choices": choices,
            "usage": usage_of(header, answers),
        }
        if request.wire.return_token_ids:
            body["prompt_token_ids"] = list(answers[0].prompt_ids)
        return orjson.dumps(body)

    def stream(self, request: ModelRequest, header: ResponseHeader) -> ChatStream:
        """An encoder for `chat.completion.chunk` events."""
        return ChatStream(request, header)

    def encode_error(self, error: RequestError) -> bytes:
        """An error in OpenAI's shape."""
        return orjson.dumps(error_body(error, NAMES))

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """An answer of another server, or one of its events."""
        return read_chunk(data)

    def status(self, error: RequestError) -> int:
        """Its own."""
        return error.status


class ChatStream:
    """Chunks; the first of a choice carries the role, the last one its finish reason."""

    def __init__(self, request: ModelRequest, header: ResponseHeader) -> None:
        self._request = request
        self._header = header

    def start(self) -> bytes:
        """An empty message of the assistant for every choice."""
        empty = {"role": "assistant", "content": "", "reasoning_content": None}
        return b"".join(sse(self._chunk(index, empty)) for index in range(self._request.choices))

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A chunk for every delta; the tokens' logprobs go with the first."""
        asked = self._request.logprobs and len(part.tokens.ids) > 0
        logprobs = logprobs_of(self._header, part.tokens) if asked else None
        deltas = [delta_json(delta) for delta in part.deltas] or [{}] * asked
        out = b""
        for delta in deltas:
            out += sse(self._chunk(choice, delta, logprobs=logprobs))
            logprobs = None
        return out

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The finish reason."""
        chunk = self._chunk(choice, {}, answer.finish_reason)
        chunk["choices"][0] |= _extras(self._request, answer)
        if self._request.wire.return_token_ids:
            chunk["prompt_token_ids"] = list(answer.prompt_ids)
        return sse(chunk)

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The usage, if asked for, and the end."""
        options, openrouter = self._request.wire.stream_options, self._request.wire.usage
        usage = b""
        if (options is not None and options.include_usage) or (openrouter is not None and openrouter.include):
            usage = sse(self._chunk(0, {}) | {"choices": [], "usage": usage_of(self._header, answers)})
        return usage + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        """An event that is an error, and no [DONE]."""
        return sse(error_body(error, NAMES))

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return {
            "id": f"chatcmpl-{self._header.id}",
            "object": "chat.completion.chunk",
            "created": self._header.created,
            "model": self._header.model,
            "choices": [choice],
        }


def check_stream_options(options: StreamOptions | None) -> None:
    """Raises RequestError 400 for options that ask for what is not done here."""
    if options is not None:
        check_neutral("stream_options.continuous_usage_stats", options.continuous_usage_stats, CONTINUOUS)


def thinks_at(effort: str | None) -> bool | None:
    """Whether an effort asks for reasoning at all."""
    return None if effort is None else effort != "none"


def _thinks(data: ChatBody) -> bool | None:
    asked = data.reasoning or Reasoning()
    effort = data.reasoning_effort or asked.effort
    return asked.enabled if effort is None else thinks_at(effort)


def _max_tokens(data: ChatBody) -> int | None:
    """The budget, in either of its two spellings. Raises RequestError 400 where they differ."""
    new, old = data.max_completion_tokens, data.max_tokens
    if new is not None and old is not None and new != old:
        raise bad_parameter("max_tokens", "max_tokens and max_completion_tokens are the same: give one of them")
    return new or old


def _check_results(messages: Sequence[Json]) -> None:
    """Raises RequestError 400 for a result of no call."""
    results = Results()
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            results.call(call["id"])
        if message["role"] == "tool":
            results.result(message["tool_call_id"], f"messages[{i}].tool_call_id")
    results.check()


def tool_choice(choice: str | Json | None, tools: list[Json] | None) -> ToolChoice:
    """OpenAI's `tool_choice`. Raises RequestError 400."""
    found: ToolChoice
    match choice:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required":
            found = "required"
        case {"type": "function", "function": {"name": str(name)}}:
            found = Named(name)
        case str():
            raise bad_parameter("tool_choice", f"tool_choice must be auto, none, required or a tool, got {choice!r}")
        case _:
            raise unknown_choice(choice, '{"type": "function", "function": {"name": …}}')
    return among(found, tools)


def unknown_choice(choice: Json, named: str) -> RequestError:
    """A `tool_choice` that is none of those that are known; `named` is how one tool is written."""
    kind = f"tool_choice of type {choice['type']!r}" if "type" in choice else "this tool_choice"
    return unsupported("tool_choice", f"{kind} is not supported; choose auto, none, required or {named}")


def among(choice: ToolChoice, tools: list[Json] | None) -> ToolChoice:
    """A choice that needs tools, checked against them. Raises RequestError 400."""
    names = [tool["function"]["name"] for tool in tools or []]
    if not names:
        raise bad_parameter("tool_choice", "tool_choice asks for a tool, but the request has no tools")
    if isinstance(choice, Named) and choice.name not in names:
        raise bad_parameter("tool_choice", f"tool_choice names {choice.name!r}; the tools are {', '.join(names)}")
    return choice


def delta_json(delta: Delta) -> Json:
    """A parser's delta in OpenAI's shape."""
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallDelta(index, call_id, name, arguments):
            call: Json = {"index": index, "function": {"arguments": arguments}}
            if call_id is not None:
                call |= {"id": call_id, "type": "function"}
                call["function"]["name"] = name
            return {"tool_calls": [call]}


def usage_of(header: ResponseHeader, answers: Sequence[Answer]) -> Json:
    """Token counts: a prompt counts once, however many answers it has."""
    prompts = {id(answer.prompt_ids): answer for answer in answers}
    prompt = sum(len(answer.prompt_ids) for answer in prompts.values())
    output = sum(len(answer.tokens.ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in prompts.values())},
        "completion_tokens_details": {"reasoning_tokens": sum(map(header.reasoning_tokens, answers))},
    }


def logprobs_of(header: ResponseHeader, tokens: Tokens) -> Json:
    """OpenAI's `logprobs` of some tokens."""
    top = tokens.top or [[] for _ in tokens.ids]
    return {
        "content": [
            _logprob(header, token, logprob) | {"top_logprobs": [_logprob(header, other, p) for p, other in others]}
            for token, logprob, others in zip(tokens.ids, tokens.logprobs, top, strict=True)
        ]
    }


def _logprob(header: ResponseHeader, token: int, logprob: float) -> Json:
    text = header.token_text(token)
    # A part of a character has no text of its own; OpenAI leaves its bytes out.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def error_body(error: RequestError, names: Mapping[str, str]) -> Json:
    """An error in OpenAI's shape, with the dialect's `names` of parameters."""
    error = translated(error, names)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _extras(request: ModelRequest, answer: Answer) -> Json:
    """What OpenAI does not have: which call a choice is, and its exact tokens when asked for."""
    extras: Json = {"interaction_id": answer.interaction_id} if request.n > 1 else {}
    if request.wire.return_token_ids:
        extras |= {
            "token_ids": answer.tokens.ids,
            "token_logprobs": answer.tokens.logprobs,
            "weight_versions": answer.versions,
        }
    return extras
