"""Sampling parameters in vLLM's words. vLLM ignores fields that it does not know, so each parameter has a rule here."""

from __future__ import annotations

from agentrl.domain.schemas import Json
from agentrl.engine.sampling_params import GRAMMARS, MAX_SEED, MAX_TOP_K
from agentrl.errors import EngineRejected

GREEDY_BELOW = 1e-6
"""Temperatures at which SGLang samples greedily too."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one."""
SAME = {
    "top_p": "top_p",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_new_tokens": "max_tokens",
    "logit_bias": "logit_bias",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "stream_interval": "stream_interval",
}
"""Parameters whose values mean the same: SGLang's name → vLLM's."""
OF_TEXT = frozenset({"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"})
"""Parameters of an answer's text, which we do not ask for."""
STRUCTURED = {"json_schema": "json", "regex": "regex", "structural_tag": "structural_tag"}


def translated(params: Json, top_logprobs: int = 0) -> Json:
    """vLLM's `sampling_params` for parameters that `sampling_params.check` has let through; null counts as absent.

    Raises EngineRejected for a parameter that vLLM has no counterpart of, and for a temperature that it would raise.
    """
    found: Json = {"logprobs": top_logprobs + 1 if top_logprobs else 0, "detokenize": False}
    for name, value in params.items():
        if value is None or name in OF_TEXT:
            continue
        if name in SAME:
            found[SAME[name]] = value
        elif name == "temperature":
            found["temperature"] = _temperature(value)
        elif name == "top_k":
            found["top_k"] = max(value, 0)  # SGLang's -1 means all tokens, as vLLM's 0 does
        elif name == "sampling_seed":
            found["seed"] = value % (MAX_SEED + 1)  # -1 would mean that there is none
        elif name in STRUCTURED:
            found["structured_outputs"] = {STRUCTURED[name]: value}
        elif name == "stop":
            # Special tokens are part of the text in which SGLang looks for stop strings.
            found |= {"stop": value, "detokenize": bool(value), "skip_special_tokens": False}
        else:
            raise EngineRejected(f"vLLM has no parameter {name}", engine_message=f"{name} is not supported")
    return found


def has_grammar(params: Json) -> bool:
    """Whether a grammar binds the answer."""
    return any(params.get(name) is not None for name in GRAMMARS)


def is_restricted(params: Json) -> bool:
    """Whether tokens are sampled from a part of the distribution."""
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return (top_p or 1) < 1 or (min_p or 0) > 0 or 0 < (top_k or 0) < MAX_TOP_K


def _temperature(value: float) -> float:
    if value < GREEDY_BELOW:
        return 0.0
    if value < LOWEST_TEMPERATURE:
        said = f"temperature {value:g}: vLLM samples at {LOWEST_TEMPERATURE:g} or above, or greedily at 0"
        raise EngineRejected(said, engine_message=said)
    return value
