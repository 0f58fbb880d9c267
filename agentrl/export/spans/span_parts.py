"""The parts that spans of sessions and of calls share: ids, times, and bounded attributes.

A span's id is a digest of its row's id, and a trace's id is the id of the root session: an export that is repeated
names the same spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentrl.version import __version__

LONGEST_TEXT = 1024
"""Characters of an attribute's text."""
MOST_NAMES = 32
"""Rewards, or numbers of an agent, that a span has an attribute for."""
CUT = "… [cut]"
SCOPE = InstrumentationScope("agentrl", __version__)
_INT64 = 2**63


def span_id(row_id: str) -> int:
    """The id of the span of a row: 8 bytes, not 0."""
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest(), "big") or 1


def context(root_id: str, row_id: str) -> SpanContext:
    """The trace of the root session, and the span of the row."""
    return SpanContext(int(root_id, 16), span_id(row_id), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def make_span(
    name: str,
    place: SpanContext,
    parent: SpanContext | None,
    *,
    kind: SpanKind,
    times: tuple[float, float],
    attributes: Mapping[str, Any],
    error: str | None,
    resource: Resource,
) -> ReadableSpan:
    """A finished span between two times (seconds since the epoch), with bounded attributes. `error`: why it failed."""
    start, end = times
    return ReadableSpan(
        name=text(name),
        context=place,
        parent=parent,
        resource=resource,
        attributes=bounded(attributes),
        kind=kind,
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, text(error)),
        start_time=int(start * 1e9),
        end_time=int(max(start, end) * 1e9),
        instrumentation_scope=SCOPE,
    )


def text(value: str, longest: int = LONGEST_TEXT) -> str:
    """Text that protobuf and all receivers can hold: no lone surrogates and NUL, cut after `longest` characters."""
    clean = value.encode(errors="replace").decode().replace("\0", "\ufffd")
    return clean if len(clean) <= longest else clean[:longest] + CUT


def bounded(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that have a value of a type that spans can hold. Texts that are already JSON keep their length."""
    found = {text(name, 200): _bounded(value) for name, value in attributes.items()}
    return {name: value for name, value in found.items() if value is not None}


def _bounded(value: Any) -> Any:
    if isinstance(value, JsonText):
        return str(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool | float) or (isinstance(value, int) and -_INT64 <= value < _INT64):
        return value
    if isinstance(value, Sequence):
        return [text(str(one)) for one in value[:MOST_NAMES]] or None
    return None


class JsonText(str):
    """Text whose size was bounded where it was made: cut anywhere else, it would not be JSON."""


def numbers(prefix: str, found: Mapping[str, float]) -> dict[str, float]:
    """`prefix` and name → number, of the first MOST_NAMES names."""
    return {f"{prefix}{name}": value for name, value in sorted(found.items())[:MOST_NAMES]}
