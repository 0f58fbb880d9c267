"""How much of what callers send is stored: numbers, names, metadata, task data, and what a call asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError

MAX_INT32 = 2**31 - 1
"""The largest number of a step, a version, an epoch or a count that every database holds."""
METADATA_BYTES = 64 * 1024
TASK_BYTES = 1024 * 1024
OPTIONS_BYTES = 256 * 1024
"""Of what a call asks for besides its messages and tools."""
LONGEST_NAME = 100
LONGEST_KEY = 200
"""Characters of an id, of an idempotency key, of a sub-agent's name."""


def _at_most(size_bytes: int) -> Callable[[Json], Json]:
    def check(value: Json) -> Json:
        if (found := len(orjson.dumps(value))) > size_bytes:
            raise ValueError(f"{found} bytes of JSON, at most {size_bytes} are stored")
        return value

    return check


Metadata = Annotated[dict[str, Any], AfterValidator(_at_most(METADATA_BYTES))]
TaskData = Annotated[dict[str, Any], AfterValidator(_at_most(TASK_BYTES))]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Key = Annotated[str, Field(max_length=LONGEST_KEY)]


def check_options(*asked: Json | None) -> None:
    """Raises RequestError 400 for a call that asks for more than is stored beside its messages and tools."""
    for options in asked:
        if options is None or len(orjson.dumps(options)) <= OPTIONS_BYTES:
            continue
        largest = max(options, key=lambda name: len(orjson.dumps(options[name])))
        name = largest[:LONGEST_NAME]
        message = f"{name}: a call has at most {OPTIONS_BYTES} bytes of parameters besides messages and tools"
        raise RequestError(400, message, code="invalid_parameter", param=name)
