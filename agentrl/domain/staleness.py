"""How old a token is, and whether another group may start: pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def ancestors(version: int, parents: Mapping[int, int | None]) -> list[int]:
    """`version`, its parent, … down to the base weights."""
    chain = [version]
    while (parent := parents.get(chain[-1])) is not None:
        chain.append(parent)
    return chain


def ages(version: int, parents: Mapping[int, int | None]) -> dict[int, int]:
    """Age of every version in `parents` as seen by a step that starts from `version`: updates since they parted.

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
"""More groups than any run has; every database can hold it."""


def capacity(*, max_staleness: int, published_step: int, groups_per_step: int, target_steps: int) -> int:
    """Groups that may have been admitted (and not returned) so far.

    (η + published_step + 1)·B, AReaL's admission bound (arXiv 2505.24298, eq. 3), never more than the run trains. A
    run without steps only records: nothing of it grows stale.
    """
    if target_steps == 0:
        return NO_BOUND
    return min(max_staleness + published_step + 1, target_steps) * groups_per_step
