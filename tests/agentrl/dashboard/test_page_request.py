"""Parameters of addresses: bounded, and refused by name."""

from __future__ import annotations

import pytest

from agentrl.dashboard.page_request import LONGEST, Query
from agentrl.errors import RequestError


def test_absent_and_empty_parameters_are_none() -> None:
    for query in (Query({}), Query({"a": "  "})):
        assert (query.text("a"), query.choice("a", "x"), query.integer("a"), query.number("a")) == (None,) * 4
        assert query.texts("a", 3) == []


def test_values_are_read() -> None:
    query = Query({"t": " two words ", "c": "x", "i": "12", "n": "-1.5e3"})
    assert (query.text("t"), query.choice("c", "x", "y"), query.integer("i"), query.number("n")) == (
        "two words",
        "x",
        12,
        -1500.0,
    )


def test_repeated_values_are_read_once_each_in_their_order() -> None:
    pairs = [("run", "b"), ("x", "1"), ("run", " a "), ("run", "b"), ("run", "")]
    assert Query({"run": "b"}, pairs).texts("run", 2) == ["b", "a"]
    with pytest.raises(RequestError, match="run: at most 1 of them"):
        Query({}, pairs).texts("run", 1)


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (Query.text, "x" * (LONGEST + 1)),
        (Query.text, "a\0b"),
        (lambda query, name: query.choice(name, "x", "y"), "z"),
        (Query.integer, "-1"),
        (Query.integer, "1.5"),
        (Query.integer, "²"),
        (Query.integer, "٣"),
        (Query.integer, str(2**31)),
        (Query.number, "nan"),
        (Query.number, "inf"),
        (Query.number, "1e999"),
        (Query.number, "ten"),
        (lambda query, name: Query({}, [(name, "a\0")]).texts(name, 3), ""),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(read, value: str) -> None:
    with pytest.raises(RequestError) as found:
        read(Query({"limit": value}), "limit")
    assert found.value.status == 400
    assert found.value.param == "limit"
    assert "limit" in str(found.value)
