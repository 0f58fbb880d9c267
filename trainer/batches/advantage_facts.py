"""What metrics and the store's records need of advantages: three numbers for each trajectory, from all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import Bool, Float64
from agentrl.trainer.batches.share import Share
from agentrl.trainer.distributed import World


@dataclass(frozen=True, slots=True)
class AdvantageFacts:
    """Facts of the advantages at loss tokens, one row for each trajectory of a batch; 0 without loss tokens."""

    means: Float64
    deviations: Float64  # sum of (advantage − mean)²
    any: Bool  # whether one is not 0


def gather_facts(share: Share, trajectories: int, world: World) -> AdvantageFacts:
    """The facts of a batch of so many trajectories. Collective."""
    mine = np.zeros((len(share.samples), 3))
    for row, sample in zip(mine, share.samples, strict=True):
        advantages = sample.advantages[sample.tokens.loss_mask].astype(np.float64)
        mean = advantages.mean()
        row[:] = mean, ((advantages - mean) ** 2).sum(), advantages.any()
    whole = np.zeros((trajectories, 3))
    for indices, rows in world.everyones((np.array(share.indices, np.int64), mine)):
        whole[indices] = rows
    return AdvantageFacts(whole[:, 0], whole[:, 1], whole[:, 2] != 0)
