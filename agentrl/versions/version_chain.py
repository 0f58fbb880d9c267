"""Which files bring a host from what it has to a version. Pure.

    v8 (whole) ◄─delta─ v9 ◄─delta─ v10 (cached) ◄─delta─ v11 ◄─delta─ v12 (wanted)

A host that has v10 reads the deltas of v11 and v12; one that has nothing reads v8 and four deltas, or the whole
files of v12 where they exist and are smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agentrl.errors import StorageError
from agentrl.versions.version_manifest import VersionManifest

MOST_DELTAS = 1000
"""Length of the longest chain."""
Find = Callable[[str, str], VersionManifest | None]
"""Gives the manifest of the version with this name and checksum; None when no source has it."""


@dataclass(frozen=True, slots=True)
class Route:
    """Start with the whole files of `base`, then apply `deltas`, the oldest first."""

    base: VersionManifest
    is_cached: bool
    """Whether the host has the base's whole files; else they are read."""
    deltas: tuple[VersionManifest, ...]
    size_bytes: int
    """Bytes to read."""


def route(wanted: VersionManifest, find: Find, is_cached: Callable[[VersionManifest], bool]) -> Route:
    """The route to `wanted` with the fewest bytes to read; of equals, the one with the fewest deltas.

    `is_cached` says whether the host has a version's whole files. Raises StorageError when no ancestor with whole files
    can be reached.
    """
    best: Route | None = None
    at, deltas, spent = wanted, list[VersionManifest](), 0
    while best is None or spent < best.size_bytes:
        here = tuple(reversed(deltas))
        if is_cached(at):
            return _better(best, Route(at, True, here, spent))
        if at.whole_bytes is not None:
            best = _better(best, Route(at, False, here, spent + at.whole_bytes))
        parent = _parent(at, find) if len(deltas) < MOST_DELTAS else None
        if parent is None:
            break
        assert at.delta is not None
        spent += at.delta.size_bytes
        deltas.append(at)
        at = parent
    if best is None:
        raise StorageError(f"{wanted.name} cannot be made: no whole files of it or of an ancestor, down to {at.name}")
    return best


def routes(wanted: VersionManifest, find: Find, is_cached: Callable[[VersionManifest], bool]) -> list[Route]:
    """`route`, and then the best of the other kind where there is one: the whole files alone, or by deltas.

    The second is for a host where the first failed. Raises StorageError as `route` does.
    """
    best = route(wanted, find, is_cached)
    if best.is_cached and not best.deltas:
        return [best]
    if best.deltas:
        size = wanted.whole_bytes
        return [best] if size is None else [best, Route(wanted, False, (), size)]
    if wanted.delta is None:
        return [best]
    try:
        return [best, route(msgspec.structs.replace(wanted, whole=None), find, is_cached)]
    except StorageError:
        return [best]


def _better(one: Route | None, other: Route) -> Route:
    return other if one is None or other.size_bytes < one.size_bytes else one


def _parent(of: VersionManifest, find: Find) -> VersionManifest | None:
    """The parent whose tensors the delta names; None when there is none, also when it is not older."""
    if of.delta is None:
        return None
    parent = find(of.delta.parent, of.delta.parent_checksum)
    if parent is None or parent.checksum != of.delta.parent_checksum or parent.version >= of.version:
        return None
    return parent
