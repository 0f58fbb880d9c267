"""SGLang's sampling parameters for a call."""

from __future__ import annotations

from agentrl.domain.schemas import GREEDY_BELOW, Json
from agentrl.engine.sampling_params import ParamRefused, check
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.call_settings import DEFAULT_TEMPERATURE
from agentrl.proxy.calls.live_sessions import Session
from agentrl.proxy.calls.prompts.rendered_prompt import Prompt
from agentrl.proxy.dialects.model_request import ModelRequest

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "structural_tag": None,
}
_STATEFUL = ("frequency_penalty", "presence_penalty", "json_schema", "regex", "structural_tag", "sampling_seed")


def replaced(request: ModelRequest, params: Json) -> Json:
    """The parameters that the caller asked for and that the run, the evaluation or the context size replaced."""
    asked = request.sampling | ({} if request.max_tokens is None else {"max_new_tokens": request.max_tokens})
    return {name: value for name, value in asked.items() if params.get(name) != value}


def modifies_distribution(params: Json) -> bool:
    """Whether the parameters change the distribution in more than its temperature."""
    return any(params.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())


def is_greedy(params: Json) -> bool:
    """Whether the engine always takes the likeliest token: such a call cannot be trained."""
    return bool(params["temperature"] < GREEDY_BELOW)


def resumable(params: Json) -> bool:
    """Whether prompt + tokens so far continue an answer exactly; penalties, grammars and seeds depend on its start."""
    return all(name not in params or params[name] == _NEUTRAL.get(name) for name in _STATEFUL)


def engine_params(context: CallContext, session: Session, request: ModelRequest, prompt: Prompt, index: int) -> Json:
    """SGLang's sampling parameters of one answer, always with a temperature.

    Raises RequestError 400 when the context cannot hold the call, a token is outside the vocabulary, or a parameter is
    out of its range: each of these can kill an engine.
    """
    _check_ids(prompt, context.renderer.vocab_size)
    forced = (session.sampling or {}) if session.is_eval else context.settings.sampling
    of_run = {name: value for name, value in forced.items() if name != "max_tokens"}
    if session.is_baseline:
        of_run["temperature"] = 0.0
    sampling = {"temperature": DEFAULT_TEMPERATURE} | request.sampling | of_run
    params: Json = {
        **sampling,
        "temperature": float(sampling["temperature"]),
        "max_new_tokens": _budget(context, request, len(prompt.token_ids), forced.get("max_tokens")),
        "stop_token_ids": context.renderer.stop_token_ids,
        "skip_special_tokens": False,
        **request.constraint,
        **prompt.grammar,
    }
    if request.stop:
        params["stop"] = request.stop
    if request.seed is not None:
        params["sampling_seed"] = request.seed + index
    if "json_schema" in params and (prompt.grammar or prompt.opening):
        message = "a response format and a forced tool call exclude each other"
        raise bad_parameter("tool_choice", message)
    try:
        check(params, context.renderer.vocab_size)
    except ParamRefused as error:
        param = (
            "tools" if error.param in prompt.grammar else error.param
        )  # the grammar of a forced call is derived from the tools
        message = str(error).replace(error.param, param, 1)
        raise bad_parameter(param, message) from error
    return params


def _check_ids(prompt: Prompt, vocab_size: int) -> None:
    """Raises RequestError 400 for an id outside the model's vocabulary. The ids of parents were checked before."""
    highest = max(prompt.delta_ids, default=0)
    if highest >= vocab_size:
        message = f"the prompt has token {highest}, which is outside the vocabulary of {vocab_size}"
        raise RequestError(400, message, code="invalid_prompt", param="messages")


def _budget(context: CallContext, request: ModelRequest, prompt_tokens: int, forced: int | None) -> int:
    """The maximum number of tokens to sample. Raises RequestError 400 when the context cannot hold them."""
    window = context.renderer.max_context
    room = (window or 1 << 30) - prompt_tokens
    clips = request.clips or context.settings.clip_max_tokens
    if room < 1 or (request.max_tokens is not None and request.max_tokens > room and not clips):
        asked = f" and {request.max_tokens} new ones" if request.max_tokens is not None else ""
        needed = f"this call needs {prompt_tokens} prompt tokens{asked}"
        raise RequestError(  # LiteLLM, and programs that use it, recognize this error by these words
            400,
            f"This model's maximum context length is {window} tokens; {needed}",
            code="context_length_exceeded",
            param="messages",
        )
    return min(n for n in (request.max_tokens, forced, room) if n is not None)
