"""From a leased batch to microbatches of tensors: groups become prefix trees, trees become rows of a grid.

T: tokens of one trajectory, B: rows, L: row width, P: distinct predictions, S: loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.batching import PrefixTree, balance, build_tree, pack_grids, split_by_budget
from agentrl.schemas import Float32, TrajectoryTokens


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with the advantage of each of its tokens."""

    tokens: TrajectoryTokens
    advantages: Float32  # (T,) 0 where not sampled

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.tokens.input_ids):
            raise ValueError("one advantage per token")
        if self.tokens.loss_mask[0]:
            raise ValueError(f"trajectory {self.tokens.trajectory_id}: the first token has no context to predict it")


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of one group that are computed as one tree. The smallest thing that a rank or a row receives."""

    samples: list[Sample]
    tree: PrefixTree


@dataclass(slots=True)
class Microbatch:
    """One forward pass. Row token i attends to row token j iff j <= i < ends[j]; padding attends to itself only."""

    input_ids_BL: Tensor  # int64
    positions_BL: Tensor  # int64
    ends_BL: Tensor  # int64
    sources_P: Tensor  # int64, flat index into B × L: the hidden state that predicts
    targets_P: Tensor  # int64, the token predicted
    temperatures_P: Tensor  # float32
    predictions_S: Tensor  # int64, the prediction of each loss token (several samples may share one)
    advantages_S: Tensor  # float32
    behavior_S: Tensor  # float32, logprobs recorded at sampling
    versions_S: Tensor  # int64, weight versions that sampled
    proximal_S: Tensor | None = field(default=None)  # float32, set once it is known

    def to(self, device: torch.device) -> Microbatch:
        """The same, on `device`."""
        names = [n for n in self.__slots__ if isinstance(getattr(self, n), Tensor)]
        return Microbatch(**{n: getattr(self, n).to(device, non_blocking=True) for n in names})


def make_units(samples: Sequence[Sample], budget: int) -> list[Unit]:
    """One tree per group; a group whose tree is over the budget is split. Samples that train nothing are left out."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.tokens.loss_mask.any():
            groups.setdefault(sample.tokens.group_id, []).append(sample)
    units = []
    for members in groups.values():
        sequences = [_used_ids(s) for s in members]
        for part in split_by_budget(sequences, budget):
            units.append(Unit([members[i] for i in part], build_tree([sequences[i] for i in part])))
    return units


def _used_ids(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Tokens up to the last loss token, which itself is only predicted: nothing reads its hidden state."""
    last = int(np.flatnonzero(sample.tokens.loss_mask)[-1])
    return sample.tokens.input_ids[:last]


def plan(units: Sequence[Unit], *, ranks: int, minibatches: int, budget: int) -> list[list[list[list[list[Unit]]]]]:
    """`plan[minibatch][rank][microbatch][row]` lists the trees of a row.

    Whole groups go to minibatches; trees go to ranks by size and to microbatches first-fit decreasing. Every rank gets
    the same number of microbatches (collectives must match): a shorter one gets empty ones, `[]`.
    """
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.samples[0].tokens.group_id, []).append(unit)
    members = list(groups.values())
    out = []
    for chosen in balance([sum(len(u.tree) for u in m) for m in members], minibatches):
        mine = [u for i in chosen for u in members[i]]
        if not mine:
            continue
        by_rank = []
        for share in balance([len(u.tree) for u in mine], ranks):
            grids = pack_grids([len(mine[i].tree) for i in share], budget)
            by_rank.append([[[mine[share[k]] for k in row] for row in grid] for grid in grids])
        longest = max(len(r) for r in by_rank)
        out.append([r + [[]] * (longest - len(r)) for r in by_rank])
    return out


def collate(rows: Sequence[Sequence[Unit]]) -> Microbatch:
    """Tensors of one microbatch; no rows give a one-token microbatch without loss tokens."""
    width = max((sum(len(u.tree) for u in row) for row in rows), default=1)
    shape = (max(1, len(rows)), width)
    ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    ends = np.tile(np.arange(1, width + 1), (shape[0], 1))
    sources, targets, temperatures, advantages, behavior, versions = [], [], [], [], [], []
    for r, row in enumerate(rows):
        at = 0
        for unit in row:
            tree, n = unit.tree, len(unit.tree)
            ids[r, at : at + n] = tree.token_ids
            positions[r, at : at + n] = tree.positions
            ends[r, at : at + n] = tree.ends + at
            for sample, path in zip(unit.samples, tree.paths, strict=True):
                t = sample.tokens
                where = np.flatnonzero(t.loss_mask)
                sources.append(path[where - 1].astype(np.int64) + r * width + at)
                targets.append(t.input_ids[where])
                temperatures.append(t.temperatures[where])
                advantages.append(sample.advantages[where])
                behavior.append(t.logprobs[where])
                versions.append(t.versions[where])
            at += n
    return _with_predictions(ids, positions, ends, sources, targets, temperatures, advantages, behavior, versions)


def _with_predictions(
    ids: np.ndarray, positions: np.ndarray, ends: np.ndarray, *lists: list[np.ndarray]
) -> Microbatch:  # type: ignore[type-arg]
    sources, targets, temperatures, advantages, behavior, versions = (
        np.concatenate(parts) if parts else np.empty(0, np.float32) for parts in lists
    )
    keys = np.stack([sources.astype(np.float64), targets.astype(np.float64), temperatures.astype(np.float64)], 1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    if not len(distinct):
        distinct = np.array([[0.0, 0.0, 1.0]])  # every pass runs the head once, so that ranks stay in step
    return Microbatch(
        input_ids_BL=torch.from_numpy(ids),
        positions_BL=torch.from_numpy(positions),
        ends_BL=torch.from_numpy(ends),
        sources_P=torch.from_numpy(distinct[:, 0].astype(np.int64)),
        targets_P=torch.from_numpy(distinct[:, 1].astype(np.int64)),
        temperatures_P=torch.from_numpy(distinct[:, 2].astype(np.float32)),
        predictions_S=torch.from_numpy(inverse.reshape(-1).astype(np.int64)),
        advantages_S=torch.from_numpy(advantages.astype(np.float32)),
        behavior_S=torch.from_numpy(behavior.astype(np.float32)),
        versions_S=torch.from_numpy(versions.astype(np.int64)),
    )
