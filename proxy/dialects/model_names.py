"""The models that calls may name: the policy (the run's name, or `default`) and the upstreams.

Encodes GET /v1/models and /v1/models/ID in OpenAI's shape, or in Anthropic's for a request with `anthropic-version`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that calls may name."""

    name: str
    created: float  # seconds since the epoch
    max_context: int | None = None  # tokens, prompt and output together


DEFAULT = "default"


def is_policy(name: str, run_name: str, aliases: Sequence[str]) -> bool:
    """Whether a name means the policy."""
    return name in (DEFAULT, run_name) or any(fnmatchcase(name, alias) for alias in aliases)


def models_body(models: Sequence[Model], *, anthropic: bool) -> bytes:
    """The list of models; the first is the policy. Anthropic's list is one page."""
    models = _named(models)
    if not anthropic:
        return orjson.dumps({"object": "list", "data": [_openai(model) for model in models]})
    ends = {"first_id": models[0].name, "last_id": models[-1].name} if models else {"first_id": None, "last_id": None}
    return orjson.dumps({"data": [_anthropic(model) for model in models], "has_more": False} | ends)


def model_body(models: Sequence[Model], name: str, *, anthropic: bool, aliases: Sequence[str] = ()) -> bytes:
    """One model, under the name that the request gives it. Raises RequestError 404 that suggests the nearest name."""
    models = _named(models)
    if name not in [model.name for model in models] and is_policy(name, models[0].name, aliases):
        models.append(replace(models[0], name=name))
    for model in models:
        if model.name == name:
            return orjson.dumps(_anthropic(model) if anthropic else _openai(model))
    hint = did_you_mean(name, [model.name for model in models])
    raise RequestError(404, f"no model {name!r}{hint}", code="model_not_found", param="model")


def _named(models: Sequence[Model]) -> list[Model]:
    """The models, with the policy under the name `default` too."""
    return [*models, *(replace(policy, name=DEFAULT) for policy in models[:1] if policy.name != DEFAULT)]


def _openai(model: Model) -> Json:
    described: Json = {"id": model.name, "object": "model", "created": int(model.created), "owned_by": "agentrl"}
    if model.max_context is not None:
        described["max_model_len"] = model.max_context  # vLLM's and SGLang's name for it
    return described


def _anthropic(model: Model) -> Json:
    created = datetime.fromtimestamp(int(model.created), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": model.max_context,
        "max_tokens": model.max_context,
    }
