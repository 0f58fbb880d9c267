"""A bounded cache of looked-up values, in five lines; cachetools would be another dependency."""

from __future__ import annotations

from typing import TypeVar

V = TypeVar("V")
REMEMBERED = 65_536


class Recent(dict[str, V]):
    """At most REMEMBERED entries; the oldest is dropped. This removes sessions that ended at other replicas."""

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]
