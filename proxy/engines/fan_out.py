"""Which host reads a version from which other host, as a tree that grows. Pure: no clock and no requests.

    absent ─ `next_fetches` names a source ─► fetching ─┬─► present
       ▲                                                └─► the source failed: it is avoided from now on
       └─────────────────────────────────────────────────┘

A host serves others when it is present, and while it fetches if it passes on the files that it has already (`relays`).

`next_fetches` is called again whenever an entry changes. It holds, for every order of the entries:

1. A host serves at most `fan_out` others at a time, and at most `origins` hosts read from the origins (the trainer's
   folder, object storage, or the proxy) at a time.
2. No host reads from a source that failed it before, from itself, or from a host that waits for it.
3. A host waits only while every source that it may use is occupied or does not have the version yet. If no host
   fetches and none is named, the hosts that are absent have no source left.

With equal transfer times, the hosts that have the version grow by a factor of `1 + fan_out` in each round. Where hosts
relay, every host has a source after a few rounds without waiting, and the last host is a few files behind the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

ORIGIN = None
"""In place of a host: the origins of the version."""


class Stage(Enum):
    """How far a host is."""

    ABSENT = "absent"
    FETCHING = "fetching"
    PRESENT = "present"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A host's copy of the version."""

    host: str
    stage: Stage
    source: str | None = ORIGIN  # of a host that is fetching
    avoids: frozenset[str | None] = field(default_factory=frozenset)  # sources that failed it
    relays: bool = False  # while it fetches, it passes on the files that it has already

    @property
    def serves(self) -> bool:
        """Whether other hosts may read from it."""
        return self.stage is Stage.PRESENT or (self.stage is Stage.FETCHING and self.relays)


def next_fetches(copies: Iterable[Copy], *, fan_out: int, origins: int) -> dict[str, str | None]:
    """The hosts that begin to fetch now → their sources."""
    found = sorted(copies, key=lambda copy: copy.host)
    reads_from = {copy.host: copy.source for copy in found if copy.stage is Stage.FETCHING}
    used = Counter(reads_from.values())
    places: list[tuple[int, str, str | None]] = [(n, "", ORIGIN) for n in range(used[ORIGIN], origins)]
    for copy in found:
        if copy.serves:
            places += [(n, copy.host, copy.host) for n in range(used[copy.host], fan_out)]
    sources = [source for _, _, source in sorted(places, key=lambda place: place[:2])]  # the least occupied first
    fetches = {}
    for copy in found:
        if copy.stage is not Stage.ABSENT or not sources:
            continue
        at = next((at for at, source in enumerate(sources) if _may_read(copy, source, reads_from)), None)
        if at is not None:
            fetches[copy.host] = sources.pop(at)
    return fetches


def _may_read(copy: Copy, source: str | None, reads_from: Mapping[str, str | None]) -> bool:
    """Whether a host may read from a source: it has not failed the host, and does not wait for the host."""
    if source in copy.avoids:
        return False
    seen: set[str] = set()
    while source is not ORIGIN and source not in seen:
        if source == copy.host:
            return False
        seen.add(source)
        source = reads_from.get(source)
    return True
