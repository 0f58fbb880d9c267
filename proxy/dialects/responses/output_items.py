"""Encodes the `response` object and its output items, for whole answers and streams."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.openai.chat_output import logprobs_of, usage_of
from agentrl.proxy.dialects.parameter_errors import translated
from agentrl.proxy.dialects.responses.input_items import seal
from agentrl.proxy.dialects.responses.response_tools import caller_name

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}
NAMES = {"messages": "input", "json_schema": "text.format"}
"""The dialect's names of parameters in errors."""
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


def output_items(request: ModelRequest, header: ResponseHeader, answer: Answer) -> list[Json]:
    """An answer's items: reasoning, message, function calls. Without calls there is a message, possibly empty."""
    message = answer.message
    calls = message.get("tool_calls") or []
    items: list[Json] = []
    if reasoning := message.get("reasoning_content"):
        items.append(new_item("reasoning", header, len(items)) | reasoning_fields(request, reasoning))
    if message["content"] or not calls:
        logprobs = text_logprobs(header, answer.tokens) if request.logprobs else []
        part = text_part(message["content"] or "", logprobs)
        items.append(new_item("message", header, len(items)) | {"content": [part]})
    for call in calls:
        name = caller_name(request.wire.tools, call["function"]["name"])
        fields = {"call_id": call["id"], **call["function"], **name}
        items.append(new_item("function_call", header, len(items)) | fields)
    for item in items:
        item["status"] = "completed"
    items[-1]["status"] = status_of(answer)
    return items


def new_item(kind: str, header: ResponseHeader, index: int) -> Json:
    """The item at `index` of a response, in progress and empty."""
    item: Json = {"type": kind, "id": f"{PREFIXES[kind]}_{header.id}_{index}", "status": "in_progress"}
    match kind:
        case "reasoning":
            item |= {"summary": [], "content": []}
        case "message":
            item |= {"role": "assistant", "content": []}
        case "function_call":
            item |= {"call_id": "", "name": "", "arguments": ""}
    return item


def reasoning_fields(request: ModelRequest, text: str) -> Json:
    """The content of a reasoning item."""
    fields: Json = {"content": [{"type": "reasoning_text", "text": text}]}
    if ENCRYPTED in (request.wire.include or ()):
        fields["encrypted_content"] = seal(text)
    return fields


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """The content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def text_logprobs(header: ResponseHeader, tokens: Tokens) -> list[Json]:
    """Logprobs as in Chat Completions, with an empty list for unknown bytes."""
    entries: list[Json] = logprobs_of(header, tokens)["content"]
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            token["bytes"] = token["bytes"] or []
    return entries


def status_of(answer: Answer) -> str:
    """`incomplete` if the answer ended at the token limit, else `completed`."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def response_json(
    request: ModelRequest,
    header: ResponseHeader,
    *,
    items: Sequence[Json] = (),
    answer: Answer | None = None,
    error: RequestError | None = None,
) -> Json:
    """The `response` with the request's settings: in progress, finished with its `answer`, or failed with `error`."""
    wire = request.wire
    status = "failed" if error else status_of(answer) if answer else "in_progress"
    return {
        "id": f"resp_{header.id}",
        "object": "response",
        "created_at": header.created,
        "status": status,
        "error": _error(error) if error else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": header.model,
        "output": list(items),
        "usage": _usage(header, answer) if answer else None,
        "previous_response_id": wire.previous_response_id,
        "instructions": wire.instructions,
        "tools": wire.tools or [],
        "tool_choice": wire.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls,
        "temperature": wire.temperature,
        "top_p": wire.top_p,
        "top_logprobs": request.top_logprobs,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": None,
        "text": {
            "format": (wire.text and wire.text.format) or {"type": "text"},
            "verbosity": (wire.text and wire.text.verbosity) or "medium",
        },
        "reasoning": {name: wire.reasoning and getattr(wire.reasoning, name) for name in ("effort", "summary")},
        "truncation": "disabled",
        "background": False,
        "store": wire.store is not False,
        "service_tier": "default",
        "metadata": wire.metadata or {},
        "user": wire.user,
        "safety_identifier": wire.safety_identifier,
        "prompt_cache_key": wire.prompt_cache_key,
    }


def _usage(header: ResponseHeader, answer: Answer) -> Json:
    usage = usage_of(header, [answer])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _error(error: RequestError) -> Json:
    """The error of a failed response, in one of OpenAI's few codes; the `error` event has agentrl's code."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {
        "code": "rate_limit_exceeded" if error.status == 429 else code,
        "message": str(translated(error, NAMES)),
    }
