"""Decodes a request's body into a struct; an error names the field at fault, and the nearest known name."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import msgspec
import orjson

from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.dialects.neutral_fields import Table
from agentrl.proxy.dialects.parameter_errors import check_neutral, unsupported
from agentrl.proxy.dialects.unreadable_json import unreadable, unwritable

S = TypeVar("S", bound=msgspec.Struct)


NEAR = 0.85
"""The least similarity of a suggested name to an unknown one: typing errors reach it, other words do not."""


SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_tokens_to_sample"),
    ("stop", "stop_sequences"),
    ("messages", "input", "prompt"),
    ("system", "instructions", "system_prompt"),
    ("response_format", "text", "output_format"),
    ("reasoning_effort", "reasoning", "thinking"),
)
"""Names of one parameter in several APIs. A caller who uses another API's name gets this API's as a suggestion."""


def decode_struct(body: bytes, shape: type[S]) -> S:
    """Decode a body into a struct that forbids unknown fields other than nulls.

    Raises RequestError 400 that names the field at fault.
    """
    try:
        data = _read(body, shape)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), shape) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(body, error) from error
    try:  # the values are written again: to the store, the engine and the caller
        orjson.dumps(data, default=_plain)
    except orjson.JSONEncodeError as error:
        raise unwritable(data, error) from error
    return data


def _plain(value: msgspec.Struct | msgspec.Raw) -> Any:
    """A struct, or JSON text to keep as it is, for orjson."""
    return orjson.Fragment(bytes(value)) if isinstance(value, msgspec.Raw) else msgspec.structs.asdict(value)


def _read(body: bytes, shape: type[S]) -> S:
    """Decode a body without its unknown fields that are null or neutral: some clients send every field they know.

    Raises RequestError 400 for a parameter in the shape's `NEUTRAL` table with another value.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError:
        known, table = shape.__struct_encode_fields__, neutral_of(shape)
        kept = {}
        for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            if name in table and name not in known:
                check_neutral(name, msgspec.json.decode(raw), table[name])
            elif name in known or bytes(raw) != b"null":
                kept[name] = raw
        return msgspec.json.decode(msgspec.json.encode(kept), type=shape)


def invalid_at(message: str, at: str) -> RequestError:
    """msgspec's message about the part of a body at `at`, as an error that names the place in the body."""
    what, _, where = message.partition(" - at `$")
    return _invalid(f"{what} - at `$.{at}{where.rstrip('`')}`", msgspec.Struct)


def neutral_of(shape: type[msgspec.Struct]) -> Table:
    """The parameters that a body accepts beside its fields, with the values that change nothing."""
    table: Table = getattr(shape, "NEUTRAL", {})
    return table


def _invalid(message: str, shape: type[msgspec.Struct]) -> RequestError:
    """msgspec's message (`Expected …, got … - at `$.field``) as an error that names the field."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if what.startswith("Object contains unknown field"):
        name = what.split("`")[1]
        param = f"{path}.{name}" if path else name
        hint = "" if path else _near(name, shape)
        return unsupported(param, f"parameter {param!r} is not supported{hint}")
    if not path and "missing required field" in what:
        path = what.split("`")[1]
    if not path:
        return RequestError(400, f"the body is not a valid request: {what}", code="invalid_json")
    return bad_parameter(path, f"{path}: {what[0].lower()}{what[1:]}")


def _near(name: str, shape: type[msgspec.Struct]) -> str:
    """`; did you mean …?` with this API's name of the same parameter, or the name that the caller probably mistyped."""
    known = [field for field in shape.__struct_encode_fields__ if field not in getattr(shape, "REFUSED", ())]
    same = next((names for names in SYNONYMS if name in names), ())
    near = [field for field in known if field in same] or (
        difflib.get_close_matches(name, known, n=1, cutoff=NEAR) if not same else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""
