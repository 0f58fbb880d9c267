"""OpenAI Chat Completions: a request decoded into what the proxy samples, an answer encoded into what SDKs read.

Every parameter is supported, harmless, or refused by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.errors import RequestError, did_you_mean
from agentrl.rendering import ContentDelta, Delta, ParsedOutput, ReasoningDelta, ToolCallDelta
from agentrl.rendering.validation import validate_messages
from agentrl.schemas import Json

_NUMBERS = {  # name → (least, greatest)
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
_HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
}
_OWN = {
    "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "n", "seed", "logprobs", "top_logprobs", "top_k", "return_token_ids", "response_format",
    "logit_bias",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A decoded request. `sampling` holds only what the caller asked for."""

    model: str | None
    messages: list[Json]
    tools: list[Json] | None
    sampling: Json
    max_tokens: int | None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


def decode(body: bytes) -> ChatRequest:
    """Read a request body. Raises RequestError: 400 for malformed JSON or messages, 422 naming a bad parameter."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise RequestError(400, "the body must be a JSON object", code="invalid_json")
    data = {key: value for key, value in data.items() if value is not None}
    for key in data:
        if key not in _NUMBERS.keys() | _HARMLESS | _OWN:
            hint = did_you_mean(key, _NUMBERS.keys() | _HARMLESS | _OWN)
            raise _bad(key, f"parameter {key!r} is not supported{hint}", code="unsupported_parameter")
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a non-empty list", code="invalid_messages", param="messages")
    validate_messages(messages)
    _refuse_unsupported(data)
    return ChatRequest(
        model=data.get("model"),
        messages=messages,
        tools=_tools(data),
        sampling=_sampling(data),
        max_tokens=_max_tokens(data),
        stop=_stop(data.get("stop", [])),
        stream=_flag(data, "stream"),
        include_usage=bool(data.get("stream_options", {}).get("include_usage")),
        logprobs=_flag(data, "logprobs"),
        return_token_ids=_flag(data, "return_token_ids"),
    )


def _bad(param: str, message: str, code: str = "invalid_parameter") -> RequestError:
    return RequestError(422, message, code=code, param=param)


def _refuse_unsupported(data: Json) -> None:
    if data.get("n", 1) != 1:
        raise _bad("n", "n must be 1: start one session per sample", code="unsupported_parameter")
    if data.get("top_logprobs", 0) != 0:
        raise _bad("top_logprobs", "top_logprobs must be 0", code="unsupported_parameter")
    for name in ("logit_bias", "seed"):
        if name in data:
            raise _bad(name, f"{name} is not supported", code="unsupported_parameter")
    if data.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise _bad(
            "response_format", "only response_format {'type': 'text'} is supported", code="unsupported_parameter"
        )


def _tools(data: Json) -> list[Json] | None:
    tools = data.get("tools") or None
    if tools is not None:
        if not isinstance(tools, list):
            raise _bad("tools", "tools must be a list")
        for i, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise _bad(f"tools[{i}]", f"tools[{i}] must be {{'type': 'function', 'function': {{'name': …}}}}")
    choice = data.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _bad("tool_choice", f"tool_choice {choice!r} is not supported; choose auto or none")
    return None if choice == "none" else tools


def _sampling(data: Json) -> Json:
    sampling: Json = {}
    for name, (least, greatest) in _NUMBERS.items():
        if name not in data:
            continue
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= greatest:
            raise _bad(name, f"{name} must be a number from {least} to {greatest}, got {value!r}")
        sampling[name] = float(value)
    if "top_k" in data:
        if isinstance(data["top_k"], bool) or not isinstance(data["top_k"], int):
            raise _bad("top_k", "top_k must be an integer")
        sampling["top_k"] = data["top_k"]
    return sampling


def _max_tokens(data: Json) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in data:
            value = data[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _bad(name, f"{name} must be a positive integer, got {value!r}")
            return int(value)
    return None


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop", "stop must be a non-empty string or a list of them")
    return stops


def _flag(data: Json, name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise _bad(name, f"{name} must be true or false, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished call, ready to be encoded."""

    completion_id: str
    model: str
    created: int
    message: Json
    finish_reason: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    token_texts: list[str] | None
    cached_tokens: int | None
    versions: list[list[int]]


def message_of(parsed: ParsedOutput) -> Json:
    """The assistant message as the client will send it back."""
    message: Json = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message


def encode(answer: Answer, request: ChatRequest) -> bytes:
    """The whole answer, for a caller that does not stream."""
    choice: Json = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer) if request.logprobs else None,
    }
    body: Json = {
        "id": answer.completion_id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
        "usage": _usage(answer),
    }
    if request.return_token_ids:
        _add_ids(body, choice, answer)
    return orjson.dumps(body)


def encode_delta(completion_id: str, model: str, created: int, delta: Json) -> bytes:
    """One server-sent event with a piece of the message."""
    return _event(_chunk(completion_id, model, created, delta, None))


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


def encode_end(answer: Answer, request: ChatRequest) -> bytes:
    """The events that end a stream; sent after the commit."""
    chunk = _chunk(answer.completion_id, answer.model, answer.created, {}, answer.finish_reason)
    choice = chunk["choices"][0]
    if request.logprobs:
        choice["logprobs"] = _logprobs(answer)
    if request.return_token_ids:
        _add_ids(chunk, choice, answer)
    out = _event(chunk)
    if request.include_usage:
        usage = _chunk(answer.completion_id, answer.model, answer.created, {}, None)
        out += _event(usage | {"choices": [], "usage": _usage(answer)})
    return out + b"data: [DONE]\n\n"


def encode_error(error: RequestError) -> bytes:
    """An error body in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return orjson.dumps({"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}})


def encode_stream_error(error: RequestError) -> bytes:
    """An error after the stream began: an event, and no [DONE]."""
    return b"data: " + encode_error(error) + b"\n\n"


def _chunk(completion_id: str, model: str, created: int, delta: Json, finish_reason: str | None) -> Json:
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


def _event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _usage(answer: Answer) -> Json:
    prompt, output = len(answer.prompt_ids), len(answer.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
    }


def _logprobs(answer: Answer) -> Json:
    assert answer.token_texts is not None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True)
        ]
    }


def _add_ids(body: Json, choice: Json, answer: Answer) -> None:
    body["prompt_token_ids"] = answer.prompt_ids
    choice["token_ids"] = answer.output_ids
    choice["token_logprobs"] = answer.logprobs
    choice["weight_versions"] = answer.versions


def now() -> int:
    """Seconds since the epoch, as `created` wants them."""
    return int(time.time())
