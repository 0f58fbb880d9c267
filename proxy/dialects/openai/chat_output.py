"""The parts of a Chat Completions answer: deltas, usage, logprobs, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.parameter_errors import translated
from agentrl.rendering import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

NAMES = {"json_schema": "response_format"}
"""The dialect's names of parameters in errors."""


def delta_json(delta: Delta) -> Json:
    """A delta of the message as the `delta` of a chunk."""
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
    """Token counts. A prompt counts once for all of its answers."""
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
    """The `logprobs` object of some tokens."""
    top = tokens.top or [[] for _ in tokens.ids]
    return {
        "content": [
            _logprob(header, token, logprob) | {"top_logprobs": [_logprob(header, other, p) for p, other in others]}
            for token, logprob, others in zip(tokens.ids, tokens.logprobs, top, strict=True)
        ]
    }


def _logprob(header: ResponseHeader, token: int, logprob: float) -> Json:
    text = header.token_text(token)
    # A token that is a part of a character has no text; like OpenAI, send no bytes for it.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def error_body(error: RequestError, names: Mapping[str, str]) -> Json:
    """An error in OpenAI's shape, with the dialect's `names` of parameters."""
    error = translated(error, names)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def extra_fields(request: ModelRequest, answer: Answer) -> Json:
    """The additions to OpenAI's choice: its interaction, and its exact tokens if requested."""
    extras: Json = {"interaction_id": answer.interaction_id} if request.n > 1 else {}
    if request.wire.return_token_ids:
        extras |= {
            "token_ids": answer.tokens.ids,
            "token_logprobs": answer.tokens.logprobs,
            "weight_versions": answer.versions,
        }
    return extras
