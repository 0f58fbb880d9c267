"""Every parameter of OpenAI's typed APIs: a value that is taken, and one that is refused by name; None where none is.

A parameter that a newer SDK has and this table has not fails the tests: somebody has to decide.
"""

from __future__ import annotations

from typing import Any

CALC = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", **CALC["function"]}  # type: ignore[dict-item]
HI = [{"role": "user", "content": "a"}]
TEXT, OBJECT = {"type": "text"}, {"type": "json_object"}
XML = {"type": "xml"}
ANY: Any = None

CHAT: dict[str, tuple[Any, Any]] = {
    "messages": (HI, "hi"),
    "model": ("m", 1),
    "audio": (None, {"voice": "alloy"}),
    "frequency_penalty": (0.5, 3),
    "function_call": (None, "auto"),
    "functions": (None, [CALC["function"]]),
    "logit_bias": ({"5": 1}, {"a": 1}),
    "logprobs": (True, "yes"),
    "max_completion_tokens": (5, 0),
    "max_tokens": (5, 0),
    "metadata": ({"a": "b"}, "a"),
    "modalities": (["text"], ["text", "audio"]),
    "moderation": (None, {"model": "omni-moderation-latest"}),
    "n": (2, 0),
    "parallel_tool_calls": (False, "no"),
    "prediction": (None, {"type": "content", "content": "x"}),
    "presence_penalty": (-0.5, -3),
    "prompt_cache_key": ("k", 1),
    "prompt_cache_options": ({"mode": "implicit"}, "x"),
    "prompt_cache_retention": ("24h", 1),
    "reasoning_effort": ("low", 1),
    "response_format": (OBJECT, XML),
    "safety_identifier": ("s", 1),
    "seed": (7, "x"),
    "service_tier": ("flex", 1),
    "stop": (["x"], [""]),
    "store": (False, "no"),
    "stream": (True, "yes"),
    "stream_options": ({"include_usage": True}, {"include_cost": 1}),
    "temperature": (0.5, 3),
    "tool_choice": ("auto", "sometimes"),
    "tools": ([CALC], [{"type": "custom"}]),
    "top_logprobs": (0, 21),
    "top_p": (0.5, 2),
    "user": ("u", 1),
    "verbosity": ("low", "brief"),
    "web_search_options": (None, {}),
}
COMPLETIONS: dict[str, tuple[Any, Any]] = {
    "model": ("m", 1),
    "prompt": ("a", []),
    "best_of": (1, 3),
    "echo": (True, "yes"),
    "frequency_penalty": (0.5, 3),
    "logit_bias": ({"5": 1}, {"a": 1}),
    "logprobs": (1, 21),
    "max_tokens": (5, 0),
    "n": (2, 0),
    "presence_penalty": (0.5, 3),
    "seed": (7, "x"),
    "stop": ("x", [""]),
    "stream": (True, "yes"),
    "stream_options": ({"include_usage": True}, {"include_cost": 1}),
    "suffix": ("", "x"),
    "temperature": (0.5, 3),
    "top_p": (0.5, 2),
    "user": ("u", 1),
}
RESPONSES: dict[str, tuple[Any, Any]] = {
    "access_programs": ({"x": True}, None),
    "background": (False, True),
    "background_options": ({}, {"window": "2h"}),
    "context_management": ([], [{"type": "compaction"}]),
    "conversation": (None, "conv_1"),
    "image": ({}, {"context_compression": "enabled"}),
    "include": (["reasoning.encrypted_content"], ["x"]),
    "input": ("a", []),
    "instructions": ("i", 1),
    "max_output_tokens": (5, 0),
    "max_tool_calls": (None, 3),
    "metadata": ({"a": "b"}, "a"),
    "model": ("m", 1),
    "moderation": (None, {"model": "omni-moderation-latest"}),
    "parallel_tool_calls": (False, "no"),
    "previous_response_id": ("resp_" + "0" * 32, "resp_1"),
    "prompt": (None, {"id": "pmpt_1"}),
    "prompt_cache_key": ("k", 1),
    "prompt_cache_options": ({"mode": "x"}, "x"),
    "prompt_cache_retention": ("24h", 1),
    "reasoning": ({"effort": "low", "summary": "auto"}, {"mode": "pro"}),
    "safety_identifier": ("s", 1),
    "service_tier": ("flex", 1),
    "store": (False, "no"),
    "stream": (True, "yes"),
    "stream_options": ({"include_obfuscation": False}, {"include_usage": True}),
    "temperature": (0.5, 3),
    "text": ({"format": TEXT, "verbosity": "low"}, {"verbosity": "brief"}),
    "tool_choice": ("auto", "sometimes"),
    "tools": ([FLAT, {"type": "web_search"}], [{"type": "custom", "name": "x"}]),
    "top_logprobs": (0, 21),
    "top_p": (0.5, 2),
    "truncation": ("disabled", "auto"),
    "user": ("u", 1),
}
OF_OPENAI = {"openai.chat": CHAT, "openai.completions": COMPLETIONS, "openai.responses": RESPONSES}

LISTED = """
import json
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
print(json.dumps({
    "openai.chat": [*chat.CompletionCreateParamsBase.__annotations__],
    "openai.completions": [*completions.CompletionCreateParamsBase.__annotations__],
    "openai.responses": [*responses.ResponseCreateParamsBase.__annotations__],
}))
"""
"""A program that prints what the SDK of its environment types."""
