"""Ages of weight versions, and the number of groups that may be admitted: pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def ancestors(version: int, parents: Mapping[int, int | None]) -> list[int]:
    """`version`, its parent, … down to the base weights."""
    chain = [version]
    while (parent := parents.get(chain[-1])) is not None:
        chain.append(parent)
    return chain


def ages(version: int, parents: Mapping[int, int | None]) -> dict[int, int]:
    """The age of every version in `parents`, at a step that starts from `version`: updates since the two lineages
    parted.

    A version on the surviving lineage is as old as the number of updates that followed it. A version of a rolled-back
    branch is as old as the newest ancestor that it shares with the surviving lineage. Versions are numbered in the
    order they were made, so a parent's number is smaller than its children's.
    """
    lineage = {v: age for age, v in enumerate(ancestors(version, parents))}
    result: dict[int, int] = {}
    for candidate in sorted(parents):
        parent = parents[candidate]
        age = lineage.get(candidate, result.get(parent, lineage.get(parent)) if parent is not None else None)
        if age is not None:
            result[candidate] = age
    return result


NO_BOUND = 2**31 - 1
"""The capacity of a run without a bound. It fits into an integer column of every database."""


def capacity(*, max_staleness: int, published_step: int, groups_per_step: int, target_steps: int) -> int:
    """The largest number of groups that may be admitted so far, without those that were returned.

    (η + published_step + 1)·B, AReaL's admission bound (arXiv 2505.24298, eq. 3), never more than the run trains. A run
    without steps only records, so its groups do not become stale.
    """
    if target_steps == 0:
        return NO_BOUND
    return min(max_staleness + published_step + 1, target_steps) * groups_per_step
