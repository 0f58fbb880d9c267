"""Sampling parameters that dialects share: checked, and converted to SGLang's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from agentrl.domain.schemas import Json
from agentrl.engine import grammars, sampling_params
from agentrl.errors import bad_parameter
from agentrl.proxy.dialects.parameter_errors import unsupported

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]  # well below 64 bits: each further answer adds one
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stop = str | list[str]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of Chat Completions and Completions; `top_k` and `min_p` are additions to OpenAI's."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=sampling_params.MAX_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self) -> Json:
        """The parameters that were given. Raises RequestError 400 for an invalid `top_k` or bias."""
        if self.top_k == 0:
            raise bad_parameter("top_k", "top_k must be -1 (all tokens) or at least 1")
        fields = SamplingBody.__struct_fields__
        asked = {name: value for name in fields if (value := getattr(self, name)) not in (None, {})}
        if self.logit_bias:
            _checked("logit_bias", partial(sampling_params.check_biases, self.logit_bias))
            asked["logit_bias"] = {str(int(token)): bias for token, bias in self.logit_bias.items()}
        return asked


def stops(value: Stop | None, param: str = "stop") -> list[str]:
    """Stop strings as a list. Raises RequestError 400 for strings that engines do not accept."""
    found = [value] if isinstance(value, str) else value or []
    _checked(param, partial(sampling_params.check_stops, found, param))
    return found


def _checked(param: str, check: Callable[[], None]) -> None:
    """Raise RequestError 400 if the check refuses."""
    try:
        check()
    except (sampling_params.ParamRefused, grammars.GrammarRefused) as error:
        named = isinstance(error, sampling_params.ParamRefused)
        raise bad_parameter(param, str(error) if named else f"{param}: {error}") from error


def format_constraint(format: Json | None, param: str, *, nested: str | None = None) -> Json:
    """SGLang's grammar for a response format (text, json_object, json_schema). Raises RequestError 400.

    With `nested` the schema is one level deeper, under that name, as in Chat Completions.
    """
    match format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": '{"type":"object"}'}
        case {"type": "json_schema"}:
            inner: Any = format.get(nested) if nested else format
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise bad_parameter(param, f"{param} of type json_schema needs a schema that is an object")
            text = orjson.dumps(schema).decode()
            _checked(param, partial(grammars.check_json_schema, text))
            return {"json_schema": text}
    kind = format.get("type")
    raise unsupported(param, f"{param} type {kind!r} is not supported; choose text, json_object or json_schema")
