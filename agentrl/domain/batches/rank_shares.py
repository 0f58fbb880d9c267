"""Divides a batch among ranks before any of them has its tokens, by lengths and by what is known to be shared. Pure.

    groups ─► minibatches of groups that teach, and the groups that do not ─► chunks of a group ─► ranks

A group stays on one rank as far as the balance allows, because its trajectories share a prompt. All ranks compute the
same shares from the same outlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import pairwise

from agentrl.domain.batches.outline import Credited, Outline
from agentrl.domain.batching import balance

CHUNKS = 8
"""A group is cut when it is larger than 1/CHUNKS of a rank's share (and than the token budget): so much a rank may have
more than another.
"""
Cut = Callable[[Sequence[int], int], list[tuple[list[int], int]]]
"""(trajectories of one group, most tokens) → chunks with at most so many distinct tokens each, and their number; a
longer trajectory is a chunk by itself.
"""


def minibatches_of(tokens: Mapping[str, int], minibatches: int) -> list[list[str]]:
    """Groups, given with their tokens, in minibatches of about equal size; empty ones are left out. Depends neither on
    ranks nor on budgets.
    """
    names = list(tokens)
    spread = balance([tokens[name] for name in names], minibatches)
    return [[names[i] for i in chosen] for chosen in spread if chosen]


def group_tokens(batch: Sequence[Credited]) -> dict[str, int]:
    """Group → tokens of its trajectories that have loss tokens, each shared token counted once per trajectory."""
    found: dict[str, int] = {}
    for one in batch:
        if one.computed_tokens:
            found[one.group_id] = found.get(one.group_id, 0) + one.length
    return found


def ranks_of(
    batch: Sequence[Credited], cut: Cut, teaching: Set[str], *, ranks: int, minibatches: int, budget: int
) -> list[int]:
    """The rank that gets each trajectory. Balanced within each minibatch of `teaching` groups, over the other groups,
    and over the trajectories without loss tokens.
    """
    tokens = group_tokens(batch)
    parts = minibatches_of({name: n for name, n in tokens.items() if name in teaching}, minibatches)
    parts.append([name for name in tokens if name not in teaching])
    members: dict[str, list[int]] = {}
    for i, one in enumerate(batch):
        if one.computed_tokens:
            members.setdefault(one.group_id, []).append(i)
    found = [0] * len(batch)
    for part in parts:
        limit = max(budget, sum(tokens[name] for name in part) // (CHUNKS * ranks))
        chunks = [chunk for name in part for chunk in cut(members[name], limit)]
        for rank, share in enumerate(balance([size for _, size in chunks], ranks)):
            for i in (i for k in share for i in chunks[k][0]):
                found[i] = rank
    idle = [i for i, one in enumerate(batch) if not one.computed_tokens]
    for rank, share in enumerate(balance([batch[i].length for i in idle], ranks)):
        for k in share:
            found[idle[k]] = rank
    return found


def cut_outlines(batch: Sequence[Outline]) -> Cut:
    """Chunks by the calls and prompts that trajectories are known to share. Their trees may share more."""

    def cut(members: Sequence[int], most: int) -> list[tuple[list[int], int]]:
        order = sorted(members, key=lambda i: _path(batch[i]))
        chunks = [([order[0]], batch[order[0]].computed_tokens)]
        for before, i in pairwise(order):
            tokens = batch[i].computed_tokens
            new = tokens - min(batch[before].shared(batch[i]), batch[before].computed_tokens, tokens)
            inside, size = chunks[-1]
            if size + new <= most:
                chunks[-1] = ([*inside, i], size + new)
            else:
                chunks.append(([i], tokens))
        return chunks

    return cut


def _path(outline: Outline) -> tuple[str, ...]:
    """A key under which trajectories that share a beginning are neighbours."""
    return tuple(part for both in zip(outline.prompts, outline.calls, strict=True) for part in both)
