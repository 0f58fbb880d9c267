"""A running average of the trained weights, which changes more smoothly than they do. It is exported, never trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.trainer.optimizer import Trainable

PART, COUNT = "average", "average_count"
"""Parts of a checkpoint: the average by the names of the policy's parameters, and `steps`."""


def newest_weight(decay: float, steps: int) -> float:
    """The weight of the newest of `steps` ≥ 1 weights in their average: (1 − d) / (1 − d^steps).

    The average is θ̄_t = Σ_i d^(t−i) θ_i / Σ_i d^(t−i), i = 1 … t: the exponential average m_t = d·m_{t−1} + (1 − d)·θ_t
    from m_0 = 0, divided by 1 − d^t as Adam's moments are (Kingma and Ba, 2015, arXiv:1412.6980, section 3). So
    θ̄_t = θ̄_{t−1} + w_t (θ_t − θ̄_{t−1}) with this w_t, and the base weights are no part of it.
    """
    assert steps >= 1
    return (1.0 - decay) / -math.expm1(steps * math.log(decay))


class WeightAverage:
    """The average of a model's trained parameters, float32, sharded as they are. No collective is needed."""

    def __init__(self, model: Trainable, decay: float) -> None:
        self._decay = decay
        self.tensors = {name: p.detach().clone() for name, p in model.trainable()}
        self.steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def add(self, model: Trainable) -> None:
        """Add the present weights, after a step."""
        self.steps += 1
        weight = newest_weight(self._decay, int(self.steps))
        for name, p in model.trainable():
            _local(self.tensors[name]).lerp_(_local(p.detach()), weight)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Its parts of a checkpoint."""
        return {PART: self.tensors, COUNT: {"steps": self.steps}}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
