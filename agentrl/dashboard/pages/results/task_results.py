"""Tasks from their groups: how often each is solved, in which order to look at them, and success over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.store.views.results.task_overview import OfGroup

BUCKETS = 24
MOST_SOURCES = 8
"""Sources that a picture shows: those with the most groups."""


@dataclass(slots=True)
class OfTask:
    """The groups of a task that were read, newest first."""

    task_id: str
    source: str | None
    groups: list[OfGroup] = field(default_factory=list)

    @property
    def episodes(self) -> int:
        """Episodes with a return."""
        return sum(group.episodes for group in self.groups)

    @property
    def success(self) -> float:
        """The share of them that succeed."""
        return sum(group.successes for group in self.groups) / self.episodes

    @property
    def mean(self) -> float:
        """Their mean return."""
        return sum(group.mean * group.episodes for group in self.groups) / self.episodes

    @property
    def best(self) -> float:
        """Their largest return."""
        return max(group.best for group in self.groups)


ORDERS: dict[str, Callable[[OfTask], tuple[float, ...]]] = {
    "hardest": lambda task: (task.success, task.mean, -task.episodes),
    "never solved": lambda task: (-task.episodes, task.mean),
    "easiest": lambda task: (-task.success, -task.mean, -task.episodes),
    "newest": lambda task: (-task.groups[0].cursor,),
}


def by_task(groups: Sequence[OfGroup], source: str | None, order: str) -> list[OfTask]:
    """The tasks of these groups, only those of `source` if given, in one of ORDERS."""
    found: dict[str, OfTask] = {}
    for group in groups:
        if source is None or group.source == source:
            found.setdefault(group.task_id, OfTask(group.task_id, group.source)).groups.append(group)
    told = [task for task in found.values() if order != "never solved" or task.success == 0]
    return sorted(told, key=lambda task: (*ORDERS[order](task), task.task_id))


def sources(groups: Sequence[OfGroup]) -> dict[str, int]:
    """Source → how many groups it has, the most frequent first."""
    found: dict[str, int] = {}
    for group in groups:
        if group.source is not None:
            found[group.source] = found.get(group.source, 0) + 1
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def over_time(groups: Sequence[OfGroup]) -> dict[str, list[tuple[float, float]]]:
    """Source → success over time: (middle place of the data, share of episodes that succeed). `all` without sources."""
    if not groups:
        return {}
    first, last = groups[-1].cursor, groups[0].cursor
    wide = max(1.0, (last - first + 1) / BUCKETS)
    named = list(sources(groups))[:MOST_SOURCES]
    counts: dict[str, dict[int, list[int]]] = {name: {} for name in named or ["all"]}
    for group in groups:
        name = group.source if named else "all"
        if name in counts:
            of_bucket = counts[name].setdefault(int((group.cursor - first) / wide), [0, 0])
            of_bucket[0] += group.successes
            of_bucket[1] += group.episodes
    return {
        name: [(first + (bucket + 0.5) * wide, won / all_) for bucket, (won, all_) in sorted(buckets.items())]
        for name, buckets in counts.items()
    }
