"""A unit of work that also runs for many submitters in one call: the group commit runs queued ones together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection

P = ParamSpec("P")
T = TypeVar("T")
Many = Callable[[Connection, Sequence[tuple[Any, ...]]], Sequence[T | Exception]]
"""Runs a unit for each tuple of positional arguments; one result per tuple, in order. An Exception fails its tuple
only.
"""


class BulkUnit(Generic[P, T]):
    """Called like `one`; the group commit calls `many` where several of its submissions wait together."""

    def __init__(self, one: Callable[Concatenate[Connection, P], T], many: Many[T]) -> None:
        self._one = one
        self.many = many
        update_wrapper(self, one)

    def __call__(self, conn: Connection, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._one(conn, *args, **kwargs)


def bulk_unit(many: Many[T]) -> Callable[[Callable[Concatenate[Connection, P], T]], BulkUnit[P, T]]:
    """Decorates a unit with its bulk form."""
    return lambda one: BulkUnit(one, many)


def only(results: Sequence[T | Exception]) -> T:
    """The result of a bulk call with one item; raises it when it is an Exception."""
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result
