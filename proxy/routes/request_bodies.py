"""The base class of all JSON request bodies except those of model calls."""

from __future__ import annotations

import json
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, model_validator

from agentrl.errors import RequestError


class Body(BaseModel):
    """Refuses unknown fields, and values that are read but cannot be written: NaN, unpaired surrogates.

    A body is parsed as JSON whatever its content type, as on the model routes: `curl -d` calls it a form.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        if isinstance(value, bytes):
            value = _parsed(value)
        try:
            orjson.dumps(value)
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot be stored: {error}") from error
        return value


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # pydantic would make a 422 of a ValueError
        raise RequestError(400, "the body is not valid JSON", code="invalid_json") from error
