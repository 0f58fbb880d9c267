"""This rank's share of a step's samples, and its packs: the samples of one microbatch each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.batches.rank_shares import Cut, group_tokens, minibatches_of, ranks_of
from agentrl.domain.batching import PrefixTree, pack, split_by_budget
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.distributed import World
from agentrl.trainer.packing import UNPACKED, Microbatch, Sample, forest, make_units, microbatch, reading_of


@dataclass(frozen=True, slots=True)
class Share:
    """The samples that this rank trains, all with loss tokens. Ranks with the same microbatches have the same share."""

    samples: list[Sample]
    indices: list[int]  # of each sample, in the batch
    groups: dict[str, int]  # all groups of the batch → their tokens (`group_tokens`)


def share_of(samples: Sequence[Sample], algorithm: Algorithm, minibatches: int, budget: int, world: World) -> Share:
    """This rank's share of samples that every rank has."""
    batch = [s.tokens for s in samples]
    groups = group_tokens(batch)
    teaching = set(groups) if algorithm.trains_every_token else {s.tokens.group_id for s in samples if _teaches(s)}
    ranks = ranks_of(batch, cut_arrays(batch), teaching, ranks=world.data_size, minibatches=minibatches, budget=budget)
    mine = [i for i, rank in enumerate(ranks) if rank == world.data_rank and batch[i].loss_mask.any()]
    return Share([samples[i] for i in mine], mine, groups)


def cut_arrays(batch: Sequence[TrajectoryTokens]) -> Cut:
    """Chunks by the trees of the tokens."""

    def cut(members: Sequence[int], most: int) -> list[tuple[list[int], int]]:
        used = [batch[i].input_ids[: batch[i].computed_tokens] for i in members]
        return [([members[k] for k in part], size) for part, size in split_by_budget(used, most)]

    return cut


@dataclass(slots=True)
class Pack:
    """The samples of one microbatch. Its tensors are made when it is computed, and not kept."""

    samples: list[Sample]
    passes: int  # passes of an unpacked model; 0: packed
    proximal_S: Tensor | None = field(default=None)  # set once it is known, as in Microbatch
    keep_S: Tensor | None = field(default=None)
    counts_S: Tensor | None = field(default=None)
    far_S: Tensor | None = field(default=None)
    teacher: str | None = field(default=None)  # of all samples, where its distributions are in the loss
    tree: PrefixTree | None = field(default=None)  # kept until the pack is computed for the last time

    @property
    def loss_tokens(self) -> int:
        """The number of loss tokens."""
        return sum(int(np.count_nonzero(s.tokens.loss_mask)) for s in self.samples)

    def microbatch(self, device: torch.device, *, last: bool = True) -> Microbatch:
        """The tensors on `device`; `last` says that they are made for the last time."""
        tree = forest(self.samples, self.passes) if self.tree is None else self.tree
        self.tree = None if last else tree
        made = microbatch(tree, self.samples, unpacked=bool(self.passes))
        if self.teacher is not None:
            made.teacher, made.reading = self.teacher, reading_of(made, self.samples, self.passes)
        made = made.to(device)
        if self.proximal_S is not None:
            made.proximal_S = self.proximal_S
        made.keep_S, made.counts_S, made.far_S = self.keep_S, self.counts_S, self.far_S
        return made


def built(
    packs: Iterable[Pack], device: torch.device, times: StepTimes, *, last: bool = True
) -> Iterator[tuple[Pack, Microbatch]]:
    """Each pack with its tensors on the device; `last` says that it is computed for the last time."""
    for one in packs:
        with times.reading("build"):
            made = one.microbatch(device, last=last)
        yield one, made


def packs_of(parts: Sequence[Iterable[Sample]], budget: int, world: World) -> list[list[Pack]]:
    """The packs of each part of this rank's samples, of at most `budget` tokens each. Every rank gets the same number
    of packs, since each is collective: a rank with fewer gets empty ones. Collective.
    """
    mine = [_packed(part, budget) for part in parts]
    counts = world.everyones([[len(samples) for samples in packs] for packs in mine])
    found = []
    for part, packs in enumerate(mine):
        longest = max(len(of_rank[part]) for of_rank in counts)
        filled = packs + [[]] * (longest - len(packs))
        passes = [max([1, *(c[part][k] for c in counts if k < len(c[part]))]) for k in range(longest)]
        found.append([Pack(s, passes[k] if budget == UNPACKED else 0) for k, s in enumerate(filled)])
    return found


def _packed(samples: Iterable[Sample], budget: int) -> list[list[Sample]]:
    units = make_units(samples, budget)
    return [[s for i in part for s in units[i].samples] for part in pack([unit.size for unit in units], budget)]


def minibatch_packs(
    share: Share, algorithm: Algorithm, minibatches: int, budget: int, world: World
) -> tuple[list[list[Pack]], list[Pack]]:
    """The packs of each minibatch of groups that the gradient depends on, and those of the other groups. The samples of
    a pack have one teacher. Collective.
    """
    teaching = teaching_groups(share, algorithm, world)
    chosen = minibatches_of({name: n for name, n in share.groups.items() if name in teaching}, minibatches)
    parts = [set(names) for names in chosen] + [share.groups.keys() - teaching]
    teachers = _teachers(share, algorithm, world)
    split = [[s for s in _of(share, names) if _teacher(s) == name] for names in parts for name in teachers]
    found = packs_of(split, budget, world)
    for i, packs in enumerate(found):
        for one in packs:
            one.teacher = teachers[i % len(teachers)]
    starts = range(0, len(found), len(teachers))
    *joined, silent = ([one for packs in found[i : i + len(teachers)] for one in packs] for i in starts)
    return joined, silent


def _teachers(share: Share, algorithm: Algorithm, world: World) -> list[str | None]:
    """The teachers of the batch whose distributions are in the loss, None for no teacher last. Collective."""
    if not algorithm.compares_vocabularies:
        return [None]
    mine = {s.taught.teacher for s in share.samples if s.taught is not None}
    return [*sorted(set().union(*world.everyones(mine))), None]


def _teacher(sample: Sample) -> str | None:
    return None if sample.taught is None else sample.taught.teacher


def _of(share: Share, groups: Set[str]) -> Iterator[Sample]:
    return (s for s in share.samples if s.tokens.group_id in groups)


def teaching_groups(share: Share, algorithm: Algorithm, world: World) -> set[str]:
    """Groups that the gradient depends on, over all ranks. Always whole groups, however they are cut. Collective."""
    if algorithm.trains_every_token:
        return set(share.groups)
    mine = {s.tokens.group_id for s in share.samples if _teaches(s)}
    return set().union(*world.everyones(mine))


def _teaches(sample: Sample) -> bool:
    return bool(sample.advantages[sample.tokens.loss_mask].any())
