"""Encodes the parts of a Messages answer other than content: the message object, stop reason, usage, errors."""

from __future__ import annotations

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader
from agentrl.proxy.dialects.parameter_errors import translated

NAMES = {"json_schema": "output_config.format"}
"""The dialect's names of parameters in errors."""
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_json(header: ResponseHeader, *, content: list[Json], usage: Json, stop: Json | None = None) -> Json:
    """The message object. A stream begins with one that has no `stop`."""
    return {
        "id": f"msg_{header.id}",
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": content,
        **(stop or {"stop_reason": None, "stop_sequence": None}),
        "usage": usage,
    }


def stop_of(header: ResponseHeader, answer: Answer) -> Json:
    """The stop reason of an answer. A tool call takes precedence over a stop sequence: the agent must run it."""
    full = header.max_context is not None and len(answer.prompt_ids) + len(answer.tokens.ids) >= header.max_context
    if answer.finish_reason == "length" and full:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if answer.finish_reason == "stop" and answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def usage_json(header: ResponseHeader, answer: Answer) -> Json:
    """Token counts. The three input counts add up to the prompt."""
    return {
        "input_tokens": len(answer.prompt_ids) - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.tokens.ids),
        "output_tokens_details": {"thinking_tokens": header.reasoning_tokens(answer)},
    }


def error_body(error: RequestError) -> Json:
    """An error in Anthropic's shape; its `details` have agentrl's error code and the parameter at fault."""
    error = translated(error, NAMES)
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    details = {"error_code": error.code, "param": error.param}
    return {"type": "error", "error": {"type": kind, "message": str(error), "details": details}}
