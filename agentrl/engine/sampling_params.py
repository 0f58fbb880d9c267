"""The sampling parameters that may be sent to an engine, with their ranges.

SGLang writes them to 32- and 64-bit tensors on its main thread, where a value out of range crashes the server. Only the
parameters in this table are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.engine import grammars

MAX_TOP_K = 2**30
"""SGLang's value for all tokens."""
MAX_NEW_TOKENS = 2**30
MAX_SEED = 2**63 - 1
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BIAS_KEY = 10
"""Maximum digits of a token id."""
MAX_STOPS = 32
"""SGLang's limit."""
MAX_STOP_CHARS = 1024
"""SGLang decodes this much of the answer's end again for each token."""
MAX_STOP_IDS = 1024


class ParamRefused(ValueError):
    """An invalid sampling parameter; `param` is SGLang's name for it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`, inclusive; `above` is an exclusive lower bound."""

    low: float
    high: float
    whole: bool = False
    above: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Validate a value. Raises ParamRefused."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            raise ParamRefused(name, f"must be {'an integer' if self.whole else 'a number'}")
        if not (self.low <= value <= self.high and math.isfinite(value)) or value == self.above:
            raise ParamRefused(name, f"must be from {self.low:g} to {self.high:g}")


NUMBERS = {
    "temperature": Number(0, 2),
    "top_p": Number(0, 1, above=0),
    "top_k": Number(-1, MAX_TOP_K, whole=True, above=0),
    "min_p": Number(0, 1),
    "frequency_penalty": Number(-2, 2),
    "presence_penalty": Number(-2, 2),
    "max_new_tokens": Number(1, MAX_NEW_TOKENS, whole=True),
    "sampling_seed": Number(-MAX_SEED, MAX_SEED, whole=True),
    "stream_interval": Number(1, MAX_NEW_TOKENS, whole=True),
}
SWITCHES = ("skip_special_tokens", "ignore_eos", "no_stop_trim", "spaces_between_special_tokens")
GRAMMARS: dict[str, Callable[[str], None]] = {
    "json_schema": grammars.check_json_schema,
    "regex": grammars.check_regex,
    "structural_tag": grammars.check_structural_tag,
}

NAMES = frozenset({*NUMBERS, *SWITCHES, *GRAMMARS, "logit_bias", "stop", "stop_token_ids"})
"""All parameters. Clients refuse others, because servers may ignore what they do not know."""


def check(params: Json, vocab_size: int) -> None:
    """Validate parameters; null counts as absent. Raises ParamRefused for the first invalid one."""
    for name, value in params.items():
        if value is None:
            continue
        if name in NUMBERS:
            NUMBERS[name].check(name, value)
        elif name == "logit_bias":
            check_biases(value, vocab_size)
        elif name == "stop":
            check_stops(value)
        elif name == "stop_token_ids":
            _check_ids(name, value, vocab_size)
        elif name in GRAMMARS:
            _check_grammar(name, value)
        elif name not in SWITCHES or not isinstance(value, bool):
            raise ParamRefused(name, "is not supported by engines")
    if sum(params.get(name) is not None for name in GRAMMARS) > 1:
        raise ParamRefused("json_schema", "an answer has one grammar: a response format or a forced tool call")


def check_biases(value: Mapping[str, float], vocab_size: int | None = None) -> None:
    """Validate logit biases. Raises ParamRefused."""
    if len(value) > MAX_BIASES:
        raise ParamRefused("logit_bias", f"{len(value)} tokens: at most {MAX_BIASES} are taken")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_BIAS_KEY):
            raise ParamRefused("logit_bias", f"{token[:40]!r} is not a token id")
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # also refuses NaN
            raise ParamRefused("logit_bias", f"{bias} is not from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        if vocab_size is not None and int(token) >= vocab_size:
            raise ParamRefused("logit_bias", f"token {token} is outside the vocabulary of {vocab_size}")


def check_stops(value: list[str], name: str = "stop") -> None:
    """Validate stop strings. Raises ParamRefused."""
    if len(value) > MAX_STOPS:
        raise ParamRefused(name, f"at most {MAX_STOPS} strings are taken, got {len(value)}")
    if not all(value):
        raise ParamRefused(name, "must not hold empty strings")
    longest = max(map(len, value), default=0)
    if longest > MAX_STOP_CHARS:
        raise ParamRefused(name, f"a string of {longest} characters: at most {MAX_STOP_CHARS} are taken")


def _check_ids(name: str, value: Any, vocab_size: int) -> None:
    if len(value) > MAX_STOP_IDS or not all(isinstance(token, int) and 0 <= token < vocab_size for token in value):
        raise ParamRefused(name, f"must be at most {MAX_STOP_IDS} ids below {vocab_size}")


def _check_grammar(name: str, value: str) -> None:
    try:
        GRAMMARS[name](value)
    except grammars.GrammarRefused as error:
        raise ParamRefused(name, str(error)) from error
