"""Random batches as padded (B, T) float64 tensors, and the same packed as the trainer has them.

Rows differ in length; some are empty, some have one token; prompts and tool results leave holes in the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.losses import LossTokens, Sums, policy_loss
from agentrl.trainer.algorithms.packed_rows import Rows


@dataclass(frozen=True, slots=True)
class Padded:
    """All (B, T) float64, but `turns` (int64) and `mask` (bool). Where the mask is off there is noise, not zeros."""

    logprobs: Tensor  # requires a gradient
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor  # one value per turn
    reference: Tensor
    entropy: Tensor  # requires a gradient
    turns: Tensor
    mask: Tensor

    @property
    def totals(self) -> Totals:
        return Totals(float(self.mask.sum()), float(self.mask.any(1).sum()))

    def packed(
        self,
        algorithm: Algorithm,
        rows: slice = slice(None),
        keep: Tensor | None = None,
        far: Tensor | None = None,
    ) -> LossTokens:
        """Some of the rows, as the loss takes them."""
        mask = self.mask[rows]
        width, count = self.mask.shape[1], len(mask)
        trajectory = torch.arange(count)[:, None].expand(-1, width)[mask]
        turn = (torch.arange(count)[:, None] * width + self.turns[rows])[mask]
        return LossTokens(
            logprobs_S=self.logprobs[rows][mask],
            proximal_S=(self.behavior if algorithm.proximal == "behavior" else self.proximal)[rows][mask],
            behavior_S=self.behavior[rows][mask],
            advantages_S=self.advantages[rows][mask],
            trajectories=Rows(trajectory, count),
            turns=Rows(turn, count * width),
            keep_S=None if keep is None else keep[rows][mask],
            far_S=None if far is None else far[rows][mask],
            reference_S=self.reference[rows][mask],
            entropy_S=self.entropy[rows][mask],
        )

    def loss(
        self,
        algorithm: Algorithm,
        rows: slice = slice(None),
        keep: Tensor | None = None,
        far: Tensor | None = None,
    ) -> tuple[Tensor, Sums]:
        """Ours."""
        return policy_loss(self.packed(algorithm, rows, keep, far), self.totals, algorithm)


def random_batch(seed: int, *, whole_trajectories: bool = False, spread: float = 0.3) -> Padded:
    """Seven rows: an empty one, one of one token, one full, others with holes; turns of their own advantage."""
    rng = np.random.default_rng(seed)
    shape = (7, 9)
    mask = rng.random(shape) < 0.6
    mask[0] = False
    mask[1] = np.arange(9) == rng.integers(9)
    mask[2] = True
    mask[3, 5:] = False
    turns = np.sort(rng.integers(0, 3, shape), 1)
    per_turn = rng.normal(0, 1, (7, 3))
    per_turn[4] = 0  # a trajectory without advantage
    advantages = per_turn[:, :1].repeat(9, 1) if whole_trajectories else np.take_along_axis(per_turn, turns, 1)
    proximal = rng.normal(-1.5, 1, shape)

    def tensor(values: np.ndarray, gradient: bool = False) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=gradient)

    return Padded(
        logprobs=tensor(proximal + rng.normal(0, spread, shape), gradient=True),
        proximal=tensor(proximal),
        behavior=tensor(proximal + rng.normal(0, 1.2, shape)),
        advantages=tensor(advantages),
        reference=tensor(proximal + rng.normal(0, 0.5, shape)),
        entropy=tensor(rng.random(shape), gradient=True),
        turns=torch.tensor(turns),
        mask=torch.tensor(mask),
    )
