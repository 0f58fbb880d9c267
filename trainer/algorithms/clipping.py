"""Surrogate losses: the loss of a token from its importance ratio and its advantage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.packed_rows import Rows

Found = tuple[Tensor, Tensor]
"""The losses (S,), and bool (S,) that says which losses the bounds changed."""
Surrogate = Callable[[Tensor, Tensor, Tensor, Rows, Algorithm], Found]
"""(ρ, log π, A, each (S,), the trajectories, algorithm) → `Found`."""


def ppo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm) -> Found:
    """max(−ρA, −clip(ρ, 1−ε_low, 1+ε_high)A); with dual clip c, at most −cA where A < 0.

    PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: arXiv 1912.09729.
    """
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss_S, changed_S = torch.maximum(plain_S, clipped_S), clipped_S > plain_S
    if algorithm.dual_clip is not None:
        bound_S = -algorithm.dual_clip * advantages_S
        beyond_S = (advantages_S < 0) & (loss_S > bound_S)
        loss_S, changed_S = torch.where(beyond_S, bound_S, loss_S), changed_S | beyond_S
    return loss_S, changed_S


def cispo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm) -> Found:
    """−sg(clip(ρ, 1−ε_low, 1+ε_high)) A log π: every token keeps a gradient. MiniMax-M1, arXiv 2506.13585, eq. 4, 5."""
    weight_S = ratio_S.detach().clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -weight_S * advantages_S * logprobs_S, weight_S != ratio_S.detach()


def sapo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm) -> Found:
    """−(4/τ) σ(τ(ρ−1)) A, τ by the sign of A: the gradient's weight is at most 1 and fades. SAPO, arXiv 2511.20347."""
    tau_S = torch.full_like(advantages_S, algorithm.sapo_tau_negative)
    tau_S[advantages_S > 0] = algorithm.sapo_tau_positive
    gate_S = torch.sigmoid(tau_S * (ratio_S - 1)) * 4 / tau_S
    return -gate_S * advantages_S, torch.zeros_like(advantages_S, dtype=torch.bool)


def geometric(
    ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm
) -> Found:
    """−g A, g the geometric mean over a trajectory of its clipped ratios, in token form.

    log ρ is bounded to at most ε_high where A ≥ 0, and to at least −ε_low elsewhere. Value and gradient are the paper's
    when all tokens of a trajectory have the same advantage. GMPO, arXiv 2507.20673.
    """
    log_S = ratio_S.log()
    bounded_S = torch.where(
        advantages_S >= 0, log_S.clamp(max=algorithm.clip_high), log_S.clamp(min=-algorithm.clip_low)
    )
    mean_S = trajectories.spread(trajectories.means(bounded_S.detach()))
    weight_S = torch.exp(mean_S + (bounded_S - bounded_S.detach()))
    return -weight_S * advantages_S, (bounded_S != log_S).detach()


def tapered(
    ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm
) -> Found:
    """−w A log π, w = 1 where A ≥ 0, else sg(min(ρ, 1)): what already became unlikely is not pushed down further.

    TOPR, arXiv 2503.14286, with its bounds 0 and 1.
    """
    ratio_S = ratio_S.detach()
    weight_S = torch.where(advantages_S >= 0, 1.0, ratio_S.clamp(max=1))
    return -weight_S * advantages_S * logprobs_S, (advantages_S < 0) & (ratio_S > 1)


def reinforce(
    ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm
) -> Found:
    """−A log π, the policy gradient. REINFORCE (Williams, 1992); GPG, arXiv 2504.02546."""
    return -advantages_S * logprobs_S, torch.zeros_like(advantages_S, dtype=torch.bool)


def unclipped(
    ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, trajectories: Rows, algorithm: Algorithm
) -> Found:
    """−ρA, the importance-weighted policy gradient."""
    return -ratio_S * advantages_S, torch.zeros_like(advantages_S, dtype=torch.bool)


SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "cispo": cispo,
    "sapo": sapo,
    "geometric": geometric,
    "tapered": tapered,
    "reinforce": reinforce,
    "none": unclipped,
}
"""The surrogate loss for each value of `Algorithm.clip`."""
