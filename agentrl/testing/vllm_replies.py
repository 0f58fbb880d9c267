"""Requests and events of vLLM's generate route, as SGLang's words that the fake engine's replies use. Without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.testing.replies import RunningReply

PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request, also where it is to be aborted."""
DEFAULT_TOKENS = 16
RANGES: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and value >= -1,
    "min_p": lambda value: 0 <= value <= 1,
    "frequency_penalty": lambda value: -2 <= value <= 2,
    "presence_penalty": lambda value: -2 <= value <= 2,
    "max_tokens": lambda value: value >= 1,
    "stream_interval": lambda value: value >= 1,
    "logprobs": lambda value: value >= -1,
    "stop": lambda value: all(value),
}
"""The sampling parameters that vLLM checks. It ignores those that it does not know."""
GRAMMARS = {"json": "json_schema", "regex": "regex", "structural_tag": "structural_tag"}


def problem_of(body: Json, vocab_size: int | None) -> str | None:
    """Why vLLM answers 400 to a request, or None."""
    ids, params = body.get("token_ids") or [], body.get("sampling_params")
    if not ids or any(token < 0 for token in ids):
        return "token_ids must not be empty or contain negative values"
    if not isinstance(params, dict):
        return "sampling_params: Field required"
    if vocab_size is not None and max(ids) >= vocab_size:
        return f"Token id {max(ids)} is out of vocabulary"
    for name, in_range in RANGES.items():
        if params.get(name) is not None and not in_range(params[name]):
            return f"{name} is out of range, got {params[name]}."
    if params.get("stop") and not params.get("detokenize", True):
        return "stop strings are only supported when detokenize is True. Set `detokenize=True` to use stop."
    if body.get("output_mode", "tokens") != "tokens":
        return "the fake engine answers with output_mode='tokens' only"
    return None


def in_sglangs_words(body: Json) -> Json:
    """The request as the fake engine's replies read it."""
    params: Json = body["sampling_params"]
    limit = params.get("max_tokens", DEFAULT_TOKENS)
    grammar = {
        GRAMMARS[name]: value for name, value in (params.get("structured_outputs") or {}).items() if name in GRAMMARS
    }
    found: Json = {
        "rid": body.get("request_id", ""),
        "input_ids": body["token_ids"],
        "sampling_params": {**params, **grammar, "max_new_tokens": limit},
    }
    if (asked := params.get("logprobs")) is not None:
        found["top_logprobs_num"] = max(asked, 1)  # the sampled token is always among them
    return found


def event_of(state: RunningReply, told: Json, *, early_spans: bool) -> Json:
    """vLLM's event for one in SGLang's words."""
    meta = told["meta_info"]
    reason = meta.get("finish_reason")
    stop_ids = state.body["sampling_params"].get("stop_token_ids") or ()
    matched = (reason or {}).get("matched")
    omit = state.reply.omit
    spans = state.spans if (reason is not None or early_spans) and "weight_versions" not in omit else None
    choice: Json = {
        "index": 0,
        "finish_reason": None if reason is None else reason["type"],
        "stop_reason": matched if isinstance(matched, str) or matched in stop_ids else None,  # not that of the model
        "token_ids": told.get("output_ids"),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans,
        "logprobs": _logprobs(meta),
    }
    if "output_ids" in omit:
        del choice["token_ids"]
    return {"request_id": f"{PREFIX}{state.body['rid']}", "usage": None, "output_mode": "tokens", "choices": [choice]}


def usage_of(state: RunningReply) -> Json:
    """The event after the last one of a reply."""
    prompt = len(state.body["input_ids"])
    usage: Json = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + state.n_sent,
        "completion_tokens": state.n_sent,
        "prompt_tokens_details": {"cached_tokens": state.reply.cached_tokens},
    }
    return {"request_id": f"{PREFIX}{state.body['rid']}", "usage": usage, "output_mode": "tokens", "choices": []}


def _logprobs(meta: Json) -> Json | None:
    sampled, likeliest = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
    if sampled is None or likeliest is None:
        return None
    return {
        "content": [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [
                    {"token_id": other, "logprob": p, "rank": rank} for rank, (p, other, _) in enumerate(ranked, 1)
                ],
            }
            for (logprob, token, _), ranked in zip(sampled, likeliest, strict=True)
        ]
    }
