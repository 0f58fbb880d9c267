"""JSON that keeps what JSON has no form for: tuples, and mappings whose keys are no strings."""

from __future__ import annotations

from typing import Any

TUPLE, ITEMS = "__tuple__", "__items__"


def encoded(value: Any) -> Any:
    """A value of tuples, lists, mappings and plain values as JSON. Raises TypeError for others."""
    if isinstance(value, tuple):
        return {TUPLE: [encoded(one) for one in value]}
    if isinstance(value, list):
        return [encoded(one) for one in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys() not in ({TUPLE}, {ITEMS}):
            return {key: encoded(one) for key, one in value.items()}
        return {ITEMS: [[encoded(key), encoded(one)] for key, one in value.items()]}
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        return encoded(value.tolist())
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def decoded(value: Any) -> Any:
    """The value that `encoded` was given."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(decoded(one) for one in value[TUPLE])
    if value.keys() == {ITEMS}:
        return {decoded(key): decoded(one) for key, one in value[ITEMS]}
    return {key: decoded(one) for key, one in value.items()}
