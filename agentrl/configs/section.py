"""The base class of configuration sections, and the types and checks that they share."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen section. Rejects unknown keys, NaN, infinity, and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def plain_address(value: str, instead: str = "") -> str:
    """Return an HTTP address without a trailing slash. Raises ValueError for an invalid URL or one with a password."""
    parts = urlsplit(value)
    if "@" in value:
        raise ValueError(f"must not contain a password, because it is stored with the run{instead}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"must be http://HOST… or https://HOST… without a query, got {value!r}")
    return value.rstrip("/")
