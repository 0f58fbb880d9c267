"""Generalized advantage estimation, and the loss of a critic (PPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.trainer.algorithms.packed_rows import Rows, suffix_sums


def gae(rewards_S: Tensor, values_S: Tensor, trajectories: Rows, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """(S,) advantages A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t, and (S,) the critic's targets A_t + V_t.

    Time runs over a trajectory's loss tokens; V is 0 after the last one. arXiv 1506.02438, eq. 16.
    """
    next_S = torch.zeros_like(values_S)
    goes_on_S = trajectories.of_S[1:] == trajectories.of_S[:-1]
    next_S[:-1] = torch.where(goes_on_S, values_S[1:], 0.0)
    advantages_S = suffix_sums(rewards_S + gamma * next_S - values_S, trajectories, gamma * lambda_)
    return advantages_S, advantages_S + values_S


def value_losses(values_S: Tensor, old_values_S: Tensor, targets_S: Tensor, clip: float | None) -> Tensor:
    """(S,) ½ max((V − T)², (V_old + clip(V − V_old, ±ε) − T)²); without ε, only the first term.

    The clipped value loss of PPO's reference implementation (arXiv 1707.06347, eq. 9, has the squared error).
    """
    losses_S = (values_S - targets_S).square()
    if clip is not None:
        near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
        losses_S = torch.maximum(losses_S, (near_S - targets_S).square())
    return losses_S / 2
