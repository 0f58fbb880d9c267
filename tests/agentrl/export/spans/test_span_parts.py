"""Ids that stay the same, and attributes of bounded size that every receiver can hold."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind

from agentrl.export.spans.span_parts import CUT, LONGEST_TEXT, MOST_NAMES, bounded, context, make_span, numbers, span_id
from agentrl.store.db.codec import new_id

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def test_ids_are_of_the_rows_alone() -> None:
    root, call = new_id(), new_id()
    place = context(root, call)
    assert f"{place.trace_id:032x}" == root
    assert place == context(root, call)
    assert place.span_id == span_id(call)
    assert len({span_id(new_id()) for _ in range(1000)}) == 1000
    assert place.is_valid


@given(st.dictionaries(st.text(st.characters(), max_size=20), anything, max_size=5), st.text(st.characters()))
def test_any_attributes_name_and_error_can_be_encoded(attributes: dict, said: str) -> None:
    span = make_span(
        said,
        context("0" * 31 + "1", "x"),
        None,
        kind=SpanKind.CLIENT,
        times=(2.0, 1.0),
        attributes=attributes,
        error=said,
        resource=Resource({}),
    )
    (made,) = encode_spans([span]).resource_spans[0].scope_spans[0].spans
    assert made.start_time_unix_nano == made.end_time_unix_nano == 2 * 10**9
    assert "\0" not in made.name + made.status.message


def test_attributes_are_bounded() -> None:
    found = bounded({"a": "x" * 5000, "b": 2**63, "c": None, "d": [], "e": math.nan, "f": ["y"] * 100, "g": -(2**63)})
    assert found["a"] == "x" * LONGEST_TEXT + CUT
    assert set(found) == {"a", "e", "f", "g"}
    assert len(found["f"]) == MOST_NAMES
    assert len(numbers("r.", {str(i): 0.0 for i in range(100)})) == MOST_NAMES
