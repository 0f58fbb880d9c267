"""Parameters that are accepted with neutral values, which change nothing, and refused by name with any other value.

Clients of other servers (vLLM, SGLang, OpenRouter, llama.cpp) send their defaults explicitly; these have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Neutral:
    """The `values` of a parameter that change nothing, and the reason why others are refused."""

    values: tuple[Any, ...]
    why: str

    def holds(self, value: Any) -> bool:
        """Whether a value changes nothing. Integers equal floats (1 is 1.0); booleans do not equal numbers."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)

    def refusal(self, name: str) -> str:
        """The error message for another value."""
        values = " or ".join(orjson.dumps(value).decode() for value in self.values)
        return f"{name}{f' other than {values}' if values else ''} is not supported: {self.why}"


Table = Mapping[str, Neutral]


_NOT_SAMPLED_SO = "use temperature, top_p, top_k or min_p"
_PENALTIES = "use frequency_penalty or presence_penalty"
_WHOLE = "an answer ends where the model or `stop` ends it"
_TEMPLATE = "the prompt is the model's chat template"
_TEXT = "text is delivered without special tokens; return_token_ids has them all"
_ONE_MODEL = "calls are answered by the model that they name"

OF_SERVERS: dict[str, Neutral] = {
    "repetition_penalty": Neutral((1,), _PENALTIES),
    "repeat_penalty": Neutral((1,), _PENALTIES),
    "length_penalty": Neutral((0, 1), "it belongs to beam search"),
    "use_beam_search": Neutral((False,), "answers are sampled"),
    "early_stopping": Neutral((False,), "it belongs to beam search"),
    "top_a": Neutral((0,), _NOT_SAMPLED_SO),
    "typical_p": Neutral((1,), _NOT_SAMPLED_SO),
    "epsilon_cutoff": Neutral((0,), _NOT_SAMPLED_SO),
    "eta_cutoff": Neutral((0,), _NOT_SAMPLED_SO),
    "mirostat": Neutral((0,), _NOT_SAMPLED_SO),
    "ignore_eos": Neutral((False,), _WHOLE),
    "min_tokens": Neutral((0,), _WHOLE),
    "min_new_tokens": Neutral((0,), _WHOLE),
    "stop_token_ids": Neutral(([],), "use stop, with strings"),
    "stop_regex": Neutral(([], ""), "use stop, with strings"),
    "include_stop_str_in_output": Neutral((False,), "answers end before the stop string"),
    "no_stop_trim": Neutral((False,), "answers end before the stop string"),
    "skip_special_tokens": Neutral((True,), _TEXT),
    "spaces_between_special_tokens": Neutral((True,), _TEXT),
    "add_generation_prompt": Neutral((True,), _TEMPLATE),
    "add_special_tokens": Neutral((False,), _TEMPLATE),
    "continue_final_message": Neutral((False,), "the client cannot write the beginning of an answer"),
    "documents": Neutral(([],), _TEMPLATE),
    "custom_params": Neutral(({},), _NOT_SAMPLED_SO),
    "custom_logit_processor": Neutral(("",), _NOT_SAMPLED_SO),
    "logits_processors": Neutral(([],), _NOT_SAMPLED_SO),
    "allowed_token_ids": Neutral(([],), _NOT_SAMPLED_SO),
    "bad_words": Neutral(([],), _NOT_SAMPLED_SO),
    "prompt_logprobs": Neutral((False,), "prompts are not scored"),
    "return_hidden_states": Neutral((False,), "answers are tokens"),
    "separate_reasoning": Neutral((True,), "reasoning is delivered apart, as reasoning_content"),
    "stream_reasoning": Neutral((True,), "reasoning is streamed as it is generated"),
    "include_reasoning": Neutral((True,), "reasoning is always delivered"),
    "priority": Neutral((0,), "calls are served as they come"),
    "models": Neutral(([],), _ONE_MODEL),
    "route": Neutral(("fallback",), _ONE_MODEL),
    "provider": Neutral(({},), _ONE_MODEL),
    "plugins": Neutral(([],), "the only tools are the agent's own"),
    "transforms": Neutral(([],), "nothing is ever cut from a conversation"),
}
"""Parameters that other servers accept in addition to OpenAI's, in Chat Completions and Completions."""

OF_CHAT: dict[str, Neutral] = OF_SERVERS | {
    "functions": Neutral((), "use tools"),
    "function_call": Neutral((), "use tool_choice"),
    "modalities": Neutral((["text"],), "the policy writes text"),
    "audio": Neutral((), "the policy writes text"),
    "prediction": Neutral((), "the engine takes no draft of an answer"),
    "verbosity": Neutral(("low", "medium", "high"), "as a hint, it has no effect on the policy"),
    "web_search_options": Neutral((), "the only tools are the agent's own"),
    "moderation": Neutral((), "answers are delivered as they were sampled"),
    "best_of": Neutral((1,), "every answer is delivered: use n"),
    "echo": Neutral((False,), "the answer is what was sampled"),
}

OF_COMPLETIONS: dict[str, Neutral] = OF_SERVERS | {
    "suffix": Neutral(("",), "the model continues the prompt; it does not fill gaps"),
}

OF_RESPONSES: dict[str, Neutral] = {
    "background": Neutral((False,), "a response is answered at once, never in the background"),
    "background_options": Neutral(({},), "a response is answered at once, never in the background"),
    "truncation": Neutral(("disabled",), "nothing is ever cut from a conversation"),
    "context_management": Neutral(([],), "nothing is ever cut from a conversation"),
    "conversation": Neutral((), "use previous_response_id, or send the whole input"),
    "prompt": Neutral((), "agentrl stores no prompts; use instructions and input"),
    "max_tool_calls": Neutral((), "it limits built-in tools, and there are none"),
    "moderation": Neutral((), "answers are delivered as they were sampled"),
    "image": Neutral(({},), "the policy reads text"),
}
