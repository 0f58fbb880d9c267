"""Upper bounds of what a request may store: numbers, names, metadata, task data, and the options of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field

from agentrl.domain.schemas import Json
from agentrl.errors import bad_parameter

MAX_INT32 = 2**31 - 1
"""The largest step, version, epoch or count that fits into a column of every database."""
METADATA_BYTES = 64 * 1024
TASK_BYTES = 1024 * 1024
OPTIONS_BYTES = 256 * 1024
"""Maximum size of a call's options, without its messages and tools."""
LONGEST_NAME = 100
LONGEST_KEY = 200
"""Characters of an id, an idempotency key, or a name of a sub-agent, a session or a group."""


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


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"it has 1 to {LONGEST_KEY} printable characters")
    return name


GroupName = Annotated[str, Field(min_length=1, max_length=LONGEST_KEY), AfterValidator(_printable)]

TokenRange = tuple[Annotated[int, Field(ge=0, le=MAX_INT32)], Annotated[int, Field(ge=0, le=MAX_INT32)]]
MOST_RANGES = 20_000
"""Maximum number of ranges of a session's trained tokens."""


def bounded_ranges(ranges: dict[str, list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """The ranges of trained tokens. Raises ValueError for too many."""
    if (found := len(ranges) + sum(len(of_call) for of_call in ranges.values())) > MOST_RANGES:
        raise ValueError(f"{found} calls and ranges, at most {MOST_RANGES} are stored")
    return ranges


def check_options(*asked: Json | None) -> None:
    """Raises RequestError 400 for a call with larger options than the store takes."""
    for options in asked:
        if options is None or len(orjson.dumps(options)) <= OPTIONS_BYTES:
            continue
        largest = max(options, key=lambda name: len(orjson.dumps(options[name])))
        name = largest[:LONGEST_NAME]
        message = f"{name}: a call has at most {OPTIONS_BYTES} bytes of parameters besides messages and tools"
        raise bad_parameter(name, message)
